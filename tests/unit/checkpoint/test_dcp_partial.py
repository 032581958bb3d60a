"""What torch.distributed.checkpoint loads of a state through our reader: parts, other shapes, objects, by name."""

import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from flextrain.checkpoint.dcp import FlextrainReader, FlextrainWriter

State = dict[str, Any]


@pytest.fixture(autouse=True)
def _one_process_is_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        yield


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A checkpoint with a bit of everything."""
    state = {
        "model": {"a": torch.arange(6.0).view(2, 3), "b": {"c": torch.tensor(7), "d": [torch.ones(2), torch.zeros(3)]}},
        "step": 5,
        "text": "hello",
        "raw": b"\x00\x01",
        "pair": (1, "two"),
        "nothing": None,
    }
    dcp.save(state, storage_writer=FlextrainWriter(tmp_path / "c"))
    return tmp_path / "c"


def load(place: Path, state: State, **options: Any) -> State:
    dcp.load(state, storage_reader=FlextrainReader(place), **options)
    return state


def reason(place: Path, state: State) -> str:
    with pytest.raises(CheckpointException) as caught:
        load(place, state)
    return " ".join(str(error) for error, _ in caught.value.failures.values())


def test_a_part_of_a_state_loads_alone(place: Path) -> None:
    found = load(place, {"model": {"b": {"c": torch.tensor(0)}}, "step": 0})
    assert found["model"]["b"]["c"].item() == 7
    assert found["model"].keys() == {"b"}
    assert found["step"] == 5


def test_tensors_are_filled_in_place(place: Path) -> None:
    a = torch.zeros(2, 3)
    load(place, {"model": {"a": a}})
    assert torch.equal(a, torch.arange(6.0).view(2, 3))


def test_values_that_are_no_tensors_come_back_as_they_were(place: Path) -> None:
    found = load(place, {"text": "", "raw": b"", "pair": (), "nothing": 1})
    assert found == {"text": "hello", "raw": b"\x00\x01", "pair": (1, "two"), "nothing": None}


def test_a_name_that_the_checkpoint_lacks_is_an_error_unless_a_part_is_enough(place: Path) -> None:
    assert "model.new" in reason(place, {"model": {"a": torch.zeros(2, 3), "new": torch.zeros(1)}})
    wanted: State = {"model": {"a": torch.zeros(2, 3), "new": torch.full((1,), 9.0)}}
    found = load(place, wanted, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert found["model"]["a"].sum() == 15
    assert found["model"]["new"].item() == 9


@pytest.mark.parametrize("shape", [(3, 2), (2, 4), (6,), (1, 3)])
def test_another_shape_is_an_error_that_names_it_and_changes_nothing(place: Path, shape: tuple[int, ...]) -> None:
    a = torch.full(shape, 9.0)
    assert "model.a" in reason(place, {"model": {"a": a}})
    assert bool((a == 9).all())


class Counter:
    """An object that torch asks for its state, and gives it back."""

    def __init__(self, count: int) -> None:
        self.count, self.weights = count, torch.full((3,), float(count))

    def state_dict(self) -> State:
        return {"count": self.count, "weights": self.weights}

    def load_state_dict(self, state: State) -> None:
        self.count, self.weights = state["count"], state["weights"]


def test_objects_with_a_state_of_their_own_get_it_back(tmp_path: Path) -> None:
    dcp.save({"counter": Counter(4)}, storage_writer=FlextrainWriter(tmp_path))
    counter = Counter(0)
    load(tmp_path, {"counter": counter})
    assert (counter.count, counter.weights.tolist()) == (4, [4.0, 4.0, 4.0])


def test_a_stream_is_an_object_that_needs_code_and_so_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"value": io.BytesIO(b"abc")}, storage_writer=FlextrainWriter(tmp_path))
    assert "does not load without running code" in str(caught.value)


def test_an_empty_state_is_a_state(tmp_path: Path) -> None:
    dcp.save({}, storage_writer=FlextrainWriter(tmp_path))
    assert load(tmp_path, {}) == {}
