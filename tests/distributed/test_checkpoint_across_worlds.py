"""A checkpoint written by any world loads bit-identically into any other: sizes 1 to 4, replicated or sharded."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor

from flextrain.checkpoint import Catalog, CheckpointSaver
from flextrain.checkpoint.shards import model_state, optimizer_state
from flextrain.config import Config
from flextrain.errors import CheckpointError, CheckpointMismatch
from flextrain.parallel import parallelize
from flextrain.storage import open_store
from flextrain.world import World

WORLDS = [(1, "ddp"), (2, "fsdp"), (3, "ddp"), (3, "fsdp"), (4, "hsdp"), (4, "zero2")]


class Uneven(nn.Module):
    """Shapes that no world divides evenly: fewer rows than ranks, scalars, a bf16 weight, an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 5) for _ in range(2)])
        self.wide = nn.Linear(5, 7)
        self.single = nn.Parameter(torch.randn(1, 3))
        self.register_buffer("count", torch.tensor(41))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.wide(x).sum() + self.single.pow(2).sum()  # type: ignore[no-any-return]


def build(world: World, strategy: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    config = Config.model_validate({"distributed": {"strategy": strategy}})
    parallel = parallelize(Uneven(), config, world, torch.device("cpu"))
    optimizer = torch.optim.AdamW(parallel.plain.parameters(), lr=0.1)
    parallel.module(torch.ones(2, 5)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return parallel.plain, optimizer


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = model_state(model) | optimizer_state(model, optimizer)
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone().numpy() for name, t in state.items()}


def save(world: World, root: str, strategy: str) -> dict[str, Any]:
    model, optimizer = build(world, strategy, seed=world.size)
    CheckpointSaver(Catalog(open_store(root)), model, optimizer).save(7, {"saved_by": world.size})
    return whole_state(model, optimizer)


def load_many(world: World, strategy: str, roots: list[str]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    loaded = []
    for root in roots:
        model, optimizer = build(world, strategy, seed=99)
        manifest = CheckpointSaver(Catalog(open_store(root)), model, optimizer).resume()
        assert manifest is not None
        loaded.append((manifest.state, whole_state(model, optimizer)))
    return loaded


def test_any_world_loads_what_any_other_saved(tmp_path: Path) -> None:
    saved, roots = [], []
    for size, strategy in WORLDS:
        roots.append(str(tmp_path / f"{size}-{strategy}"))
        local_size = 2 if strategy == "hsdp" else None
        saved.append(run_ranks(size, save, roots[-1], strategy, local_size=local_size)[0])
    for size, strategy in WORLDS:
        local_size = 2 if strategy == "hsdp" else None
        for rank in run_ranks(size, load_many, strategy, roots, local_size=local_size):
            for (state, tensors), expected, (saver_size, _) in zip(rank, saved, WORLDS, strict=True):
                assert state == {"saved_by": saver_size}
                assert tensors.keys() == expected.keys()
                for name in expected:
                    assert (tensors[name] == expected[name]).all(), (name, size, strategy, saver_size)


def save_with_a_broken_rank(world: World, root: str) -> str:
    model, optimizer = build(world, "fsdp", seed=0)
    saver = CheckpointSaver(Catalog(open_store(root)), model, optimizer)
    saver.save(1, {})
    if world.rank == 1:  # a disk that is full for its writer
        assert saver._writer
        resource.prlimit(saver._writer.pid, resource.RLIMIT_FSIZE, (1000, 1000))
    with pytest.raises(CheckpointError, match="rank 1 could not write step 2"):
        saver.save(2, {})
    return str(saver.catalog.steps())


def test_a_rank_that_cannot_write_fails_the_save_everywhere_and_the_old_one_stays(tmp_path: Path) -> None:
    assert run_ranks(3, save_with_a_broken_rank, str(tmp_path)) == ["[1]"] * 3


def resume_where_one_shard_is_bad(world: World, root: str) -> int | None:
    model, optimizer = build(world, "fsdp", seed=0)
    saver = CheckpointSaver(Catalog(open_store(root)), model, optimizer)
    saver.save(1, {})
    saver.save(2, {})
    if world.is_main:
        for path in Path(root).glob("step-00000002/*/rank-00001.bin"):
            raw = bytearray(path.read_bytes())
            raw[0] ^= 1
            path.write_bytes(raw)
    torch.distributed.barrier()
    manifest = CheckpointSaver(Catalog(open_store(root)), model, optimizer).resume()  # which holds nothing in memory
    return manifest.step if manifest else None


def test_all_ranks_fall_back_together_where_only_one_met_the_damage(tmp_path: Path) -> None:
    assert run_ranks(2, resume_where_one_shard_is_bad, str(tmp_path)) == [1, 1]


def load_a_wrong_model(world: World, root: str) -> str:
    model, optimizer = build(world, "fsdp", seed=0)
    CheckpointSaver(Catalog(open_store(root)), model, optimizer).save(1, {})
    other = nn.Linear(3, 3)
    with pytest.raises(CheckpointMismatch) as caught:
        CheckpointSaver(Catalog(open_store(root)), other, torch.optim.AdamW(other.parameters())).resume()
    return caught.value.code


def test_every_rank_hears_of_a_wrong_model(tmp_path: Path) -> None:
    assert run_ranks(2, load_a_wrong_model, str(tmp_path)) == ["FT-CKP-005"] * 2
