"""Ranks load together: the store is asked once for what many want, and peers give what one cannot reach."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.support.forked import forked_writers
from tests.support.gang import Gang
from tests.support.proxy import proxied
from tests.support.ranks import run_ranks
from tests.support.s3 import Bucket, bucket, s3_endpoint
from tests.support.subject import CHUNK_BYTES, small_chunks
from torch import nn
from torch.distributed.tensor import DTensor

from flextrain.checkpoint import Catalog, CheckpointSaver, exchange
from flextrain.checkpoint.chunks import Chunks, Target
from flextrain.checkpoint.dcp import FlextrainWriter
from flextrain.checkpoint.exchange import read_together
from flextrain.checkpoint.manifest import Manifest
from flextrain.checkpoint.shards import State, allocate_optimizer_state, model_state, optimizer_state
from flextrain.config import Config
from flextrain.errors import FlextrainError, StorageError
from flextrain.parallel import parallelize
from flextrain.storage import Store, open_store
from flextrain.world import World

__all__ = ["bucket", "s3_endpoint"]
Whole = dict[str, Any]


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(60, 70), nn.Linear(70, 3)
        self.register_buffer("count", torch.tensor(41))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))  # type: ignore[no-any-return]


def build(world: World, strategy: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    config = Config.model_validate({"distributed": {"strategy": strategy}})
    parallel = parallelize(Wide(), config, world, torch.device("cpu"))
    optimizer = torch.optim.AdamW(parallel.plain.parameters(), lr=0.1)
    allocate_optimizer_state(parallel.plain, optimizer)
    return parallel.plain, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    return model_state(model) | optimizer_state(model, optimizer)


def whole(state: State) -> Whole:
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone().numpy() for name, t in state.items()}


def save(world: World, root: str, strategy: str) -> Whole:
    """A committed step 1, of a state that is no constant anywhere; all of it."""
    small_chunks()
    model, optimizer = build(world, strategy, seed=world.size)
    for tensor in state_of(model, optimizer).values():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local.copy_((local + 1) * (1 + torch.arange(local.numel()).view(local.shape)))
    with forked_writers():
        saver = CheckpointSaver(Catalog(open_store(root)), model, optimizer)
        saver.save(1, {})
        saver.close()
    return whole(state_of(model, optimizer))


def load(world: World, root: str, strategy: str, environ: dict[str, str]) -> Whole:
    os.environ.update(environ)
    small_chunks()
    model, optimizer = build(world, strategy, seed=99)
    saver = CheckpointSaver(Catalog(open_store(root)), model, optimizer)
    saver.load(saver.catalog, 1)
    return whole(state_of(model, optimizer))


def same(found: Whole, expected: Whole) -> bool:
    return found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def four() -> Iterator[Gang]:
    """Ranks on two nodes, who know how to talk to S3 from the first time on."""
    made = Gang(4, local_size=2)
    yield made
    made.end()


@pytest.mark.parametrize(("savers", "saved_as", "loaded_as"), [(3, "fsdp", "ddp"), (2, "zero2", "hsdp")])
def test_every_byte_leaves_the_store_once(
    tmp_path: Path, bucket: Bucket, four: Gang, savers: int, saved_as: str, loaded_as: str
) -> None:
    saved = run_ranks(savers, save, str(tmp_path), saved_as)
    for path in tmp_path.glob("step-00000001/**/*.*"):
        bucket.client().upload_file(str(path), bucket.name, f"run/{path.relative_to(tmp_path)}")
    size_bytes = sum(path.stat().st_size for path in tmp_path.rglob("rank-*.bin"))
    assert size_bytes > 4 * CHUNK_BYTES
    with proxied(bucket.endpoint) as (proxy, url):
        environ = {**bucket.environ, "AWS_ENDPOINT_URL": url}
        loaded = four.run(load, f"{bucket.url}/run", loaded_as, environ)
    assert all(same(found, saved[0]) for found in loaded)
    assert proxy.data_bytes == size_bytes


def places_of(world: World, root: str) -> list[Store]:
    """Each rank has a folder of its own; nobody has a store."""
    return [open_store(root).child(f"node-{world.rank}")]


def load_from_peers(world: World, root: str, strategy: str) -> Whole:
    small_chunks()
    model, optimizer = build(world, strategy, seed=99)
    manifest = Catalog(open_store(root)).manifest(1)
    read_together(places_of(world, root), manifest, state_of(model, optimizer))
    return whole(state_of(model, optimizer))


@pytest.fixture(scope="module")
def dealt(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Whole]:
    """A checkpoint of three ranks of which every object lies in the folder of one node, of two; and what is in it."""
    root = tmp_path_factory.mktemp("dealt")
    saved = run_ranks(3, save, str(root), "fsdp")
    for index, path in enumerate(sorted((root / "step-00000001").glob("*/*.bin"))):
        target = root / f"node-{index % 2}" / path.parent.name / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, target)
    return root, saved[0]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_what_lies_on_another_node_comes_from_there(dealt: tuple[Path, Whole], strategy: str) -> None:
    root, saved = dealt  # the third rank has nothing
    assert all(same(found, saved) for found in run_ranks(3, load_from_peers, str(root), strategy))


def ailing_place(world: World, patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise StorageError("the place ails", number=4)

    if world.rank == 1:
        patch.setattr(Chunks, "fetch", refuse)


def no_memory(world: World, patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise MemoryError("no room")

    if world.rank == 0:
        patch.setattr(Chunks, "fetch", refuse)


def no_room_at_a_receiver(world: World, patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise MemoryError("no room")

    if world.rank == 2:
        patch.setattr(Target, "place", refuse)


def noisy_network(world: World, patch: pytest.MonkeyPatch) -> None:
    isend = dist.isend

    def noisy(message: torch.Tensor, *args: Any, **options: Any) -> Any:
        message[5] ^= 1
        return isend(message, *args, **options)

    if world.rank == 0:
        patch.setattr(exchange.dist, "isend", noisy)


Fault = Callable[[World, pytest.MonkeyPatch], None]
FAULTS: list[tuple[Fault, str, str]] = [
    (ailing_place, "FT-STO-004", "the place ails"),
    (no_memory, "FT-CKP-007", "MemoryError: no room"),
    (no_room_at_a_receiver, "FT-CKP-007", "MemoryError: no room"),
    (noisy_network, "FT-CKP-060", "was damaged on its way from rank 0 to rank"),
]


def errors_of(world: World, root: str, faults: list[Fault]) -> list[str]:
    return [error_of(world, root, fault) for fault in faults]


def error_of(world: World, root: str, fault: Fault) -> str:
    with pytest.MonkeyPatch.context() as patch:
        fault(world, patch)
        try:
            load_from_peers(world, root, "ddp")
        except FlextrainError as error:
            said = f"{error.code} {error.text}"
        except MemoryError as error:  # on the rank that met it
            said = f"FT-CKP-007 MemoryError: {error}"
        dist.barrier()  # nobody waits for anybody else
        return said


def test_what_fails_at_one_rank_is_raised_at_all(dealt: tuple[Path, Whole]) -> None:
    for said in run_ranks(3, errors_of, str(dealt[0]), [fault for fault, _, _ in FAULTS]):
        for line, (fault, code, text) in zip(said, FAULTS, strict=True):
            assert line.startswith(code), (fault, line)
            assert text in line


def flip_a_bit(world: World, root: str) -> None:
    if world.is_main:
        path = next(Path(root).glob("node-1/*/*.bin"))
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)


def lose_an_object(world: World, root: str) -> None:
    if world.is_main:
        next(Path(root).glob("node-1/*/*.bin")).unlink()


def damage_and_load(world: World, root: str) -> list[str]:
    def then_load(damage: Callable[[World, str], None]) -> str:
        damage(world, root)
        dist.barrier()
        return error_of(world, root, lambda world, patch: None)

    return [then_load(damage) for damage in (flip_a_bit, lose_an_object)]


def test_a_corrupt_or_missing_object_is_that_to_all(tmp_path: Path, dealt: tuple[Path, Whole]) -> None:
    shutil.copytree(dealt[0], tmp_path / "copy")
    for corrupt, missing in run_ranks(3, damage_and_load, str(tmp_path / "copy")):
        assert corrupt.startswith("FT-CKP-006")
        assert "differs from its hash" in corrupt
        assert missing.startswith("FT-CKP-002")


def peak_beyond_destination(world: World, root: str, rows: int) -> int:
    """Bytes of memory that a load takes at its peak, besides the tensors it fills."""
    state = {"model.wide": torch.ones(rows, 1 << 20)}
    manifest = Manifest.from_json(Path(root, "manifest.json").read_bytes(), root)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    read_together(places_of(world, root), manifest, state)
    assert bool((state["model.wide"] == torch.arange(rows)[:, None]).all())
    return resident("VmHWM") - before


def resident(what: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what)]
    return int(line.split()[1]) * 1024


def save_wide(world: World, root: str, rows: int) -> None:
    wide = torch.arange(rows, dtype=torch.float32)[:, None].expand(rows, 1 << 20)
    dcp.save({"model": {"wide": wide}}, storage_writer=FlextrainWriter(root), no_dist=True)


def test_memory_stays_bounded_on_both_sides(tmp_path: Path) -> None:
    rows = 80  # of 4 MiB
    run_ranks(1, save_wide, str(tmp_path / "node-0"), rows)
    shutil.copy(tmp_path / "node-0" / "manifest.json", tmp_path)
    for peak in run_ranks(2, peak_beyond_destination, str(tmp_path), rows):
        assert peak < 128 << 20, peak
