"""Objects that are damaged, cut or missing on any nodes and in the store: all ranks load every bit, or fail as one."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.gang import Gang
from tests.support.saved import save_now
from tests.support.seeds import seeded
from tests.support.subject import CHUNK_BYTES, small_chunks
from torch import nn

from flextrain.checkpoint import Catalog
from flextrain.checkpoint.exchange import read_together
from flextrain.checkpoint.shards import _box, allocate_optimizer_state, model_state, optimizer_state
from flextrain.config import Config
from flextrain.errors import FlextrainError
from flextrain.parallel import parallelize
from flextrain.storage import Store, open_store
from flextrain.world import World

SIZE = 3
STEP = "step-00000001"


class Far(Store):
    """A folder that is read as a remote store is."""

    @property
    def local_root(self) -> None:
        return None


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    made = Gang(SIZE)
    yield made
    made.end()


def build(world: World, strategy: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    config = Config.model_validate({"distributed": {"strategy": strategy}})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 130), nn.Linear(130, 50))
    plain = parallelize(model, config, world, torch.device("cpu")).plain
    optimizer = torch.optim.AdamW(plain.parameters())
    allocate_optimizer_state(plain, optimizer)
    return plain, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return model_state(model) | optimizer_state(model, optimizer)


def parts(state: dict[str, Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What this rank holds of each tensor, and what that should be."""
    for name, tensor in state.items():
        box = _box(name, tensor)
        whole = torch.arange(len(name), len(name) + tensor.numel(), dtype=torch.float32).reshape(box.shape)
        yield box.local, whole[tuple(slice(a, a + n) for a, n in zip(box.start, box.local.shape, strict=True))]


def save(world: World, root: str) -> None:
    small_chunks()
    model, optimizer = build(world, "fsdp")
    for local, value in parts(state_of(model, optimizer)):
        local.copy_(value)
    save_now(root, model, optimizer, 1, {})


def load(world: World, root: str, strategy: str) -> str:
    """What came of it: "whole", "wrong", or an error's code."""
    small_chunks()
    state = state_of(*build(world, strategy))
    manifest = Catalog(open_store(root)).manifest(1)
    places = [open_store(f"{root}/node-{world.rank}"), Far(f"{root}/far", folder=Path(root, "far"))]
    try:
        read_together(places, manifest, state)
        found = "whole" if all(torch.equal(local, value) for local, value in parts(state)) else "wrong"
    except FlextrainError as error:
        found = error.code
    dist.barrier()
    return found


def spoil(rng: random.Random, path: Path, how: str) -> None:
    raw = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "cut":
        path.write_bytes(raw[: rng.randrange(len(raw))])
    elif how == "flip":
        for _ in range(rng.randint(1, 3)):
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        path.write_bytes(raw)


@pytest.fixture(scope="module")
def saved(gang: Gang, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    gang.run(save, str(root))
    sizes = [path.stat().st_size for path in root.glob(f"{STEP}/*/rank-*.bin")]
    assert len(sizes) == SIZE
    assert min(sizes) > 2 * CHUNK_BYTES
    return root


@seeded(150)
def test_whatever_is_damaged_all_ranks_load_every_bit_or_fail_as_one(
    gang: Gang, saved: Path, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    shutil.copytree(saved / STEP, tmp_path / STEP)
    names = [path.relative_to(saved / STEP) for path in sorted((saved / STEP).glob("*/*.bin"))]
    far = rng.choice([["sound"], ["sound", "missing"], ["sound", "flip", "cut", "missing"], ["missing"]])
    near = rng.choice([["sound", "missing"], ["missing", "flip"], ["sound", "flip", "cut", "missing", "missing"]])
    state: dict[str, dict[Any, str]] = {}
    for place, hows in [("far", far), *((f"node-{rank}", near) for rank in range(SIZE))]:
        for name in names:
            how = state.setdefault(place, {})[name] = rng.choice(hows)
            (tmp_path / place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(saved / STEP / name, tmp_path / place / name)
            spoil(rng, tmp_path / place / name, how)
    found = gang.run(load, str(tmp_path), rng.choice(["ddp", "fsdp"]))
    assert found == [found[0]] * SIZE
    there = {name: [state[place][name] for place in state] for name in names}
    if all(state["far"][name] == "sound" for name in names) or all("flip" not in hows for hows in there.values()):
        reachable = all({"sound", "flip"} & set(hows) for hows in there.values())
        assert found[0] == ("whole" if reachable else "FT-CKP-002")
    else:
        assert found[0] in ("whole", "FT-CKP-006", "FT-CKP-002")
