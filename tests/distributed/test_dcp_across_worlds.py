"""torch.distributed.checkpoint with our writer and reader on real ranks: N save, M load, an error is heard by all."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.support.ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from flextrain.checkpoint.dcp import FlextrainReader, FlextrainWriter
from flextrain.world import World

SIZES = [1, 2, 3]


class Uneven(nn.Module):
    """Fewer rows than ranks, a scalar buffer, and shapes that no world divides evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.small = nn.Linear(5, 7), nn.Linear(3, 1)
        self.register_buffer("count", torch.tensor(41))


def build(world: World, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = Uneven()
    if world.size > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world.size,)))
    return model


def whole(model: nn.Module) -> dict[str, Any]:
    state = model.state_dict()
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone().numpy() for name, t in state.items()}


def save(world: World, place: str) -> dict[str, Any]:
    model = build(world, seed=world.size)
    dcp.save({"model": model.state_dict(), "step": world.size}, storage_writer=FlextrainWriter(place))
    return whole(model)


def load_many(world: World, places: list[str]) -> list[tuple[int, dict[str, Any]]]:
    found = []
    for place in places:
        model = build(world, seed=99)
        state: dict[str, Any] = {"model": model.state_dict(), "step": 0}
        dcp.load(state, storage_reader=FlextrainReader(place))
        model.load_state_dict(state["model"])
        found.append((state["step"], whole(model)))
    return found


def test_any_number_of_ranks_loads_what_any_other_saved(tmp_path: Path) -> None:
    places = [str(tmp_path / str(size)) for size in SIZES]
    saved = [run_ranks(size, save, place)[0] for size, place in zip(SIZES, places, strict=True)]
    assert len(list((tmp_path / "3").glob("*/rank-*.bin"))) == 3
    for size in SIZES:
        for rank in run_ranks(size, load_many, places):
            for (step, tensors), expected, saver in zip(rank, saved, SIZES, strict=True):
                assert step == saver
                assert tensors.keys() == expected.keys()
                assert all((tensors[name] == expected[name]).all() for name in expected), (size, saver)


class Failing:
    """Planners and a writer that fail in one place, on one rank."""

    def __init__(self, where: str, rank: int) -> None:
        self.where, self.rank = where, rank

    def here(self, where: str, world: World) -> None:
        if (where, world.rank) == (self.where, self.rank):
            raise RuntimeError(f"{where} broke on rank {world.rank}")


def fail(world: World, root: str, cases: list[tuple[str, int]]) -> list[dict[int, str]]:
    """Which ranks' errors this rank heard of, per case; then a save that succeeds at the same place."""
    heard = []
    for case in cases:
        failing, place = Failing(*case), f"{root}/{'-'.join(map(str, case))}"

        class SavePlanner(DefaultSavePlanner):
            def create_local_plan(self) -> Any:
                failing.here("local plan", world)  # noqa: B023
                return super().create_local_plan()

            def create_global_plan(self, plans: Any) -> Any:
                failing.here("global plan", world)  # noqa: B023
                return super().create_global_plan(plans)

            def resolve_data(self, item: Any) -> Any:
                failing.here("data", world)  # noqa: B023
                return super().resolve_data(item)

        class Writer(FlextrainWriter):
            def finish(self, *args: Any, **kwargs: Any) -> None:
                failing.here("finish", world)  # noqa: B023
                super().finish(*args, **kwargs)

        model = build(world, seed=0)
        with pytest.raises(CheckpointException) as caught:
            dcp.save({"model": model.state_dict()}, storage_writer=Writer(place), planner=SavePlanner())
        heard.append({rank: str(error) for rank, (error, _) in caught.value.failures.items()})
        assert not Path(place, "manifest.json").exists()
        torch.distributed.barrier()
        dcp.save({"model": model.state_dict()}, storage_writer=FlextrainWriter(place))
        dcp.load({"model": model.state_dict()}, storage_reader=FlextrainReader(place))
    return heard


def test_an_error_anywhere_in_a_save_is_heard_by_all_and_the_next_save_succeeds(tmp_path: Path) -> None:
    cases = [("local plan", 1), ("global plan", 0), ("data", 2), ("finish", 0)]
    for heard in run_ranks(3, fail, str(tmp_path), cases):
        assert heard == [{rank: f"{where} broke on rank {rank}"} for where, rank in cases]


def fail_to_load(world: World, place: str) -> list[str]:
    class LoadPlanner(DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            if world.rank == 1:
                raise RuntimeError("no plan on rank 1")
            return super().create_local_plan()

    class Reader(FlextrainReader):
        def read_metadata(self, *args: Any, **options: Any) -> Any:
            if world.rank == 1:
                raise OSError("no metadata on rank 1")
            return super().read_metadata(*args, **options)

    model = build(world, seed=0)
    dcp.save({"model": model.state_dict()}, storage_writer=FlextrainWriter(place))
    heard = []
    for reader, planner in ((FlextrainReader(place), LoadPlanner()), (Reader(place), None)):
        with pytest.raises(CheckpointException) as caught:
            dcp.load({"model": model.state_dict()}, storage_reader=reader, planner=planner)
        heard += [f"{rank}: {error}" for rank, (error, _) in caught.value.failures.items()]
    torch.distributed.barrier()
    if world.is_main:
        for data in Path(place).glob("*/rank-00001.bin"):
            data.write_bytes(bytes(data.stat().st_size))
    torch.distributed.barrier()
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"model": model.state_dict()}, storage_reader=FlextrainReader(place))
    return [*heard, *{type(error).__name__ for error, _ in caught.value.failures.values()}]


def test_an_error_of_one_rank_in_a_load_is_heard_by_all(tmp_path: Path) -> None:
    for plan, metadata, *damage in run_ranks(2, fail_to_load, str(tmp_path / "c")):
        assert plan == "1: no plan on rank 1"
        assert metadata.startswith("1: ")
        assert "no metadata on rank 1" in metadata
        assert damage == ["CheckpointCorrupt"]
