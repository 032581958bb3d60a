"""Snapshots in memory and on disks that each node has for itself, with several ranks: whole, or passed over by all."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.distributed.test_checkpoint_across_worlds import build
from tests.support.ranks import run_ranks
from torch.distributed.tensor import DTensor

from flextrain.checkpoint import Catalog, CheckpointSaver, CheckpointTier
from flextrain.checkpoint.shards import model_state, optimizer_state
from flextrain.checkpoint.tiers import Route
from flextrain.storage import open_store
from flextrain.world import World

MEMORY, NVME, S3 = CheckpointTier


class Rank:
    """One rank of a gang in which every rank is a node with a disk of its own; its state is one number everywhere."""

    def __init__(self, world: World, root: str, strategy: str) -> None:
        self.model, self.optimizer = build(world, strategy, seed=0)
        self.catalog = Catalog(open_store(f"{root}/store"))
        self.route = Route(f"{root}/disk-{world.rank}")
        self.saver = self.fresh()

    def fresh(self) -> CheckpointSaver:
        return CheckpointSaver(self.catalog, self.model, self.optimizer, route=self.route)

    def become(self, number: float) -> None:
        self.saver._tensors()
        for tensor in [*model_state(self.model).values(), *optimizer_state(self.model, self.optimizer).values()]:
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(number)

    def numbers(self) -> set[float]:
        state = model_state(self.model) | optimizer_state(self.model, self.optimizer)
        local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in state.values()]
        return {float(value) for tensor in local for value in tensor.detach().flatten()}

    def save(self, step: int, tier: CheckpointTier) -> None:
        self.become(step)
        self.saver.snapshot(step, {}, tier)
        self.saver.wait()
        dist.barrier()

    def resume(self, saver: CheckpointSaver) -> tuple[int, set[float]]:
        self.become(-1)
        manifest = saver.resume()
        assert manifest
        return manifest.step, self.numbers()


def from_memory(world: World, root: str, strategy: str) -> bool:
    rank = Rank(world, root, strategy)
    rank.save(1, S3)
    rank.save(2, MEMORY)
    found = rank.resume(rank.saver)
    rank.saver.close()
    return found == (2, {2.0})


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp"])
def test_a_state_comes_back_from_memory(tmp_path: Path, strategy: str) -> None:
    assert run_ranks(4, from_memory, str(tmp_path), strategy, local_size=2) == [True] * 4


def from_memory_that_one_rank_lost(world: World, root: str) -> tuple[int, set[float]]:
    rank = Rank(world, root, "fsdp")
    rank.save(1, S3)
    rank.save(2, MEMORY)
    if world.rank == 1:
        assert rank.saver.arena
        for slot in range(rank.saver.arena.slots):
            rank.saver.arena.put_label(slot, None)
    found = rank.resume(rank.saver)
    rank.saver.close()
    return found


def test_what_one_rank_lost_from_memory_all_take_from_elsewhere(tmp_path: Path) -> None:
    assert run_ranks(2, from_memory_that_one_rank_lost, str(tmp_path)) == [(1, {1.0})] * 2


def from_own_disks(world: World, root: str, strategy: str) -> bool:
    rank = Rank(world, root, strategy)
    rank.save(1, S3)
    rank.save(2, NVME)
    rank.saver.close()
    return rank.resume(rank.fresh()) == (2, {2.0})


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp"])
def test_a_state_comes_back_from_the_disks_of_the_nodes(tmp_path: Path, strategy: str) -> None:
    assert run_ranks(4, from_own_disks, str(tmp_path), strategy, local_size=2) == [True] * 4


def from_disks_of_which_one_is_gone(world: World, root: str) -> list[tuple[int, set[float]]]:
    rank = Rank(world, root, "fsdp")
    for step, tier in ((1, S3), (2, NVME)):
        rank.save(step, tier)
    rank.saver.close()
    found = []
    for victim in ("step-00000002", "step-00000001"):  # what the store lacks, then what it has
        if world.rank == 1:
            for path in Path(root, "disk-1").glob(f"{victim}/*/*"):
                path.unlink()
        dist.barrier()
        found.append(rank.resume(rank.fresh()))
    return found


def test_a_lost_disk_costs_what_only_it_had(tmp_path: Path) -> None:
    assert run_ranks(2, from_disks_of_which_one_is_gone, str(tmp_path)) == [[(1, {1.0})] * 2] * 2


def save_two(world: World, root: str) -> None:
    rank = Rank(world, root, "fsdp")
    rank.save(1, S3)
    rank.save(2, NVME)
    rank.saver.close()


def resume_with_all_disks_at_hand(world: World, root: str) -> tuple[int, set[float]]:
    rank = Rank(world, root, "fsdp")
    rank.route = Route(f"{root}/disk")
    return rank.resume(rank.fresh())


def test_a_smaller_world_takes_a_larger_ones_parts_from_a_disk(tmp_path: Path) -> None:
    run_ranks(3, save_two, str(tmp_path))
    for rank in range(3):
        for path in Path(tmp_path, f"disk-{rank}").glob("step-*/*/rank-*"):
            there = tmp_path / "disk" / path.relative_to(tmp_path / f"disk-{rank}")
            there.parent.mkdir(parents=True, exist_ok=True)
            path.rename(there)
    assert run_ranks(2, resume_with_all_disks_at_hand, str(tmp_path)) == [(2, {2.0})] * 2


def spread_any_dtype(world: World) -> bool:
    from flextrain.checkpoint.shards import _writers, spread

    dtypes = (torch.bfloat16, torch.int8, torch.bool, torch.float64, torch.complex64, torch.float8_e4m3fn)
    state = {str(dtype): torch.zeros(3, 2).to(dtype) for dtype in dtypes} | {"scalar": torch.zeros(())}
    state["strided"] = torch.zeros(4, 6)[::2, ::3]
    writers = _writers(state)
    for name, tensor in state.items():
        if writers[name] == world.rank:
            tensor.copy_(torch.ones(tensor.shape).to(tensor.dtype))
    spread(state)
    return all(bool((tensor.to(torch.float32) == 1).all()) for tensor in state.values())


def test_what_one_rank_holds_reaches_the_others_in_any_dtype() -> None:
    assert run_ranks(3, spread_any_dtype) == [True] * 3
