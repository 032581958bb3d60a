"""torch.distributed.checkpoint with our writer and reader, where a hook fails on a rank: all hear of it, none waits."""

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.support.gang import Gang
from tests.support.ranks import start_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from flextrain.checkpoint.dcp import FlextrainReader, FlextrainWriter
from flextrain.world import World

SIZE = 3
State = dict[str, Any]


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    made = Gang(SIZE)
    yield made
    made.end()


def state_of(world: World, fill: float) -> State:
    mesh = init_device_mesh("cpu", (world.size,))
    sharded = distribute_tensor(torch.full((7, 2), fill), mesh, [Shard(0)])
    return {"sharded": sharded, "replicated": torch.full((5,), fill), "list": [torch.full((2,), fill), "text"]}


def whole(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found


def fail(method: str, ranks: set[int], base: type) -> Any:
    """`base` with a method that raises on some ranks."""

    def broken(self: Any, *args: Any, **options: Any) -> Any:
        if dist.get_rank() in ranks:
            raise RuntimeError(f"{method} broke")
        return getattr(super(kind, self), method)(*args, **options)

    kind = type(f"Broken{base.__name__}", (base,), {method: broken})
    return kind


# Coordinator: 0. Hooks of one rank alone, and those of each.
SAVE_HOOKS: list[tuple[type, str, set[int]]] = [
    (FlextrainWriter, "set_up_storage_writer", {0}),
    (FlextrainWriter, "set_up_storage_writer", {2}),
    (DefaultSavePlanner, "set_up_planner", {1}),
    (FlextrainWriter, "prepare_local_plan", {0, 2}),
    (DefaultSavePlanner, "create_local_plan", {1}),
    (FlextrainWriter, "prepare_global_plan", {0}),
    (DefaultSavePlanner, "create_global_plan", {0}),
    (DefaultSavePlanner, "finish_plan", {2}),
    (DefaultSavePlanner, "resolve_data", {0, 1, 2}),
    (FlextrainWriter, "write_data", {1, 2}),
    (FlextrainWriter, "finish", {0}),
]
LOAD_HOOKS: list[tuple[type, str, set[int]]] = [
    (FlextrainReader, "read_metadata", {0}),
    (FlextrainReader, "read_metadata", {2}),
    (FlextrainReader, "set_up_storage_reader", {1}),
    (DefaultLoadPlanner, "set_up_planner", {2}),
    (FlextrainReader, "prepare_local_plan", {0, 1}),
    (DefaultLoadPlanner, "create_local_plan", {2}),
    (FlextrainReader, "prepare_global_plan", {0}),
    (DefaultLoadPlanner, "create_global_plan", {0}),
    (DefaultLoadPlanner, "finish_plan", {1}),
    (FlextrainReader, "read_data", {0, 2}),
    (DefaultLoadPlanner, "commit_tensor", {1}),
]


def heard(caught: pytest.ExceptionInfo[BaseException]) -> dict[int, str]:
    assert isinstance(caught.value, CheckpointException)
    return {rank: str(error) for rank, (error, _) in caught.value.failures.items()}


def save_with(world: World, root: str) -> list[dict[int, str]]:
    found = []
    for number, (base, method, ranks) in enumerate(SAVE_HOOKS):
        kind, place = fail(method, ranks, base), f"{root}/{number}"
        writer = kind(place) if base is FlextrainWriter else FlextrainWriter(place)
        planner = DefaultSavePlanner() if base is FlextrainWriter else kind()
        with pytest.raises(CheckpointException) as caught:
            dcp.save(state_of(world, 1.0), storage_writer=writer, planner=planner)
        found.append(heard(caught))
        dist.barrier()
        assert not Path(place, "manifest.json").exists()
    return found


def test_a_save_fails_on_all_where_any_hook_fails_on_any_rank(gang: Gang, tmp_path: Path) -> None:
    for found in gang.run(save_with, str(tmp_path)):
        for (_, method, ranks), errors in zip(SAVE_HOOKS, found, strict=True):
            assert errors == dict.fromkeys(sorted(ranks), f"{method} broke"), (method, ranks, errors)


def load_with(world: World, place: str) -> list[dict[int, str]]:
    dcp.save(state_of(world, 1.0), storage_writer=FlextrainWriter(place))
    found = []
    for base, method, ranks in LOAD_HOOKS:
        kind = fail(method, ranks, base)
        reader = kind(place) if base is FlextrainReader else FlextrainReader(place)
        planner = DefaultLoadPlanner() if base is FlextrainReader else kind()
        with pytest.raises(CheckpointException) as caught:
            dcp.load(state_of(world, 0.0), storage_reader=reader, planner=planner)
        found.append(heard(caught))
    state = state_of(world, 0.0)
    dcp.load(state, storage_reader=FlextrainReader(place))
    assert bool((whole(state["sharded"]) == 1).all())
    return found


def test_a_load_fails_on_all_where_any_hook_fails_on_any_rank(gang: Gang, tmp_path: Path) -> None:
    for found in gang.run(load_with, str(tmp_path / "c")):
        for (_, method, ranks), errors in zip(LOAD_HOOKS, found, strict=True):
            assert errors.keys() == ranks, (method, ranks, errors)
            assert all(f"{method} broke" in text for text in errors.values())


def save_without_rank_1(world: World, place: str) -> str:
    """Rank 1 never takes part, until the others have given up on it."""
    group, state, said = dist.new_group(timeout=timedelta(seconds=2)), state_of(world, 1.0), ""
    if world.rank != 1:
        try:
            dcp.save(state, storage_writer=FlextrainWriter(place), process_group=group)
        except (RuntimeError, CheckpointException) as error:
            said = str(error)
    dist.barrier()
    return said


def test_a_rank_that_never_comes_strands_nobody_longer_than_the_timeout(gang: Gang, tmp_path: Path) -> None:
    said = gang.run(save_without_rank_1, str(tmp_path / "c"))
    assert said[0]
    assert said[2]
    assert not (tmp_path / "c" / "manifest.json").exists()
    gang.end()  # its groups are of no use any more


def die_while_writing(world: World, place: str) -> str:
    class Dying(FlextrainWriter):
        def write_data(self, *args: Any, **options: Any) -> Any:
            if world.rank == 1:
                os._exit(9)
            return super().write_data(*args, **options)

    try:
        dcp.save(state_of(world, 1.0), storage_writer=Dying(place))
    except (RuntimeError, CheckpointException) as error:
        return f"heard: {error}"
    return "saved"


def test_a_rank_that_dies_while_it_writes_fails_the_save_on_all_others(tmp_path: Path) -> None:
    ranks = start_ranks(SIZE, die_while_writing, str(tmp_path / "c"))
    for rank in (0, 2):
        pipe = ranks[rank][1]
        assert pipe.poll(60), "it waits for the dead"
        ok, said = pipe.recv()
        assert ok, said
        assert said.startswith("heard: ")
    for process, _ in ranks:
        process.join(60)
    assert not (tmp_path / "c" / "manifest.json").exists()


def async_save_and_fail(world: World, root: str) -> tuple[dict[int, str], bool]:
    good, bad = state_of(world, 1.0), fail("write_data", {1}, FlextrainWriter)
    with pytest.raises(CheckpointException) as caught:
        dcp.async_save(good, storage_writer=bad(f"{root}/bad")).result()  # type: ignore[union-attr]
    future = dcp.async_save(good, storage_writer=FlextrainWriter(f"{root}/good"))
    good["sharded"].to_local().zero_()  # the save has a copy
    future.result()  # type: ignore[union-attr]
    state = state_of(world, 0.0)
    dcp.load(state, storage_reader=FlextrainReader(f"{root}/good"))
    return heard(caught), bool((whole(state["sharded"]) == 1).all())


def test_an_asynchronous_save_commits_or_tells_all_ranks(gang: Gang, tmp_path: Path) -> None:
    assert gang.run(async_save_and_fail, str(tmp_path)) == [({1: "write_data broke"}, True)] * SIZE


def save_alone(world: World, place: str) -> bool:
    if world.rank == 1:
        dcp.save({"mine": torch.arange(4)}, storage_writer=FlextrainWriter(place), no_dist=True)
    dist.barrier()
    state = {"mine": torch.zeros(4, dtype=torch.int64)}
    dcp.load(state, storage_reader=FlextrainReader(place), no_dist=True)
    return torch.equal(state["mine"], torch.arange(4))


def test_one_rank_may_save_for_itself_and_each_may_load_alone(gang: Gang, tmp_path: Path) -> None:
    assert gang.run(save_alone, str(tmp_path / "c")) == [True] * SIZE
