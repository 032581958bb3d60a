"""torch.distributed.checkpoint through our writer and reader, in one process: exact, verified, committed, harmless."""

import io
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.saved import save_now
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, _EmptyStateDictLoadPlanner

from flextrain.checkpoint import Catalog
from flextrain.checkpoint.catalog import read_manifest
from flextrain.checkpoint.dcp import FlextrainReader, FlextrainWriter
from flextrain.checkpoint.manifest import ITEM_BYTES, sealed, unsealed
from flextrain.checkpoint.reader import verify
from flextrain.errors import CheckpointError
from flextrain.storage import open_store

State = dict[str, Any]


@pytest.fixture(autouse=True)
def _one_process_is_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        yield


def save(place: Path, state: State, **options: Any) -> None:
    dcp.save(state, storage_writer=FlextrainWriter(place), **options)


def load(place: Path, state: State) -> State:
    dcp.load(state, storage_reader=FlextrainReader(place))
    return state


def load_all(place: Path) -> State:
    """The whole state, rebuilt from metadata alone."""
    state: State = {}
    reader = FlextrainReader(place)
    dcp.state_dict_loader._load_state_dict(
        state, storage_reader=reader, no_dist=True, planner=_EmptyStateDictLoadPlanner()
    )
    return state


def reasons(caught: pytest.ExceptionInfo[BaseException]) -> str:
    assert isinstance(caught.value, CheckpointException)
    return " ".join(str(error) for error, _ in caught.value.failures.values())


def test_a_nested_state_comes_back_whole(tmp_path: Path) -> None:
    state = {
        "model": {"w": torch.randn(5, 3), "scalar": torch.tensor(7), "none": torch.empty(0, 4)},
        "list": [torch.arange(3), {"deep": torch.ones(2)}, "text"],
        "step": 12,
        "facts": {"lr": 0.1, "name": "näme", "flags": [True, None]},
    }
    save(tmp_path / "c", state)
    found = load_all(tmp_path / "c")
    assert torch.equal(found["model"]["w"], state["model"]["w"])  # type: ignore[index]
    assert found["model"]["scalar"].item() == 7
    assert found["model"]["none"].shape == (0, 4)
    assert torch.equal(found["list"][0], torch.arange(3))
    assert torch.equal(found["list"][1]["deep"], torch.ones(2))
    assert (found["list"][2], found["step"], found["facts"]) == ("text", 12, state["facts"])


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_every_dtype_is_saved_bit_by_bit(tmp_path: Path, dtype: str) -> None:
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (4 * 6 * ITEM_BYTES[dtype],), dtype=torch.uint8)
    tensor = raw.view(getattr(torch, dtype)).view(4, 6)
    save(tmp_path, {"t": tensor, "part": tensor.T[1:3]})
    found = load(tmp_path, {"t": torch.zeros_like(tensor), "part": torch.zeros_like(tensor.T[1:3].contiguous())})
    assert torch.equal(found["t"].view(torch.uint8), tensor.view(torch.uint8))
    assert torch.equal(found["part"].view(torch.uint8), tensor.T[1:3].contiguous().view(torch.uint8))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=5))
def test_any_shapes_come_back(tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]]) -> None:
    place = tmp_path_factory.mktemp("shapes") / "c"
    state = {f"t{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    save(place, dict(state))
    found = load(place, {name: torch.zeros_like(tensor) for name, tensor in state.items()})
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_a_value_is_converted_to_the_dtype_it_is_loaded_into(tmp_path: Path) -> None:
    save(tmp_path, {"t": torch.arange(4, dtype=torch.int32)})
    assert torch.equal(load(tmp_path, {"t": torch.zeros(4)})["t"], torch.arange(4.0))


def test_what_was_saved_is_a_checkpoint_like_any_other(tmp_path: Path) -> None:
    place = tmp_path / "step-00000012"
    save(place, {"model": {"w": torch.randn(3)}, "step": 12})
    folder = open_store(place)
    assert Catalog(open_store(tmp_path)).check(12) == read_manifest(folder)
    verify(folder, read_manifest(folder))


def test_the_trainers_checkpoints_load_too(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    save_now(tmp_path, model, optimizer, 5, {"config": {}})
    other = nn.Linear(3, 2)
    load(tmp_path / "step-00000005", {"model": other.state_dict()})
    assert torch.equal(model.weight, other.weight)
    assert load_all(tmp_path / "step-00000005")["optim"].keys() >= {"weight.exp_avg", "bias.step"}


def test_async_save_commits_too(tmp_path: Path) -> None:
    weights = torch.randn(64)
    dcp.async_save({"w": weights}, storage_writer=FlextrainWriter(tmp_path / "c")).result()  # type: ignore[union-attr]
    assert torch.equal(load(tmp_path / "c", {"w": torch.zeros(64)})["w"], weights)


def test_a_second_save_to_the_same_place_is_refused_and_leaves_the_first_alone(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.ones(4)})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointException) as caught:
        save(tmp_path, {"w": torch.zeros(4)})
    assert "holds a checkpoint already" in reasons(caught)
    assert sorted(tmp_path.rglob("*")) == before
    save(tmp_path, {"w": torch.zeros(4)}, checkpoint_id=str(tmp_path / "other"))  # torch's way to name the next place
    assert load(tmp_path, {"w": torch.zeros(4)})["w"].sum() == 4


def test_the_slower_of_two_writers_is_refused(tmp_path: Path) -> None:
    class Slow(FlextrainWriter):
        def finish(self, *args: Any, **kwargs: Any) -> None:
            save(tmp_path, {"w": torch.ones(4)})
            super().finish(*args, **kwargs)

    with pytest.raises(CheckpointException) as caught:
        dcp.save({"w": torch.zeros(4)}, storage_writer=Slow(tmp_path))
    assert "committed by another attempt" in reasons(caught)
    assert load(tmp_path, {"w": torch.zeros(4)})["w"].sum() == 4


def test_leftovers_of_a_failed_save_go_with_the_next_good_one_and_nothing_else_does(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "deadbeef").mkdir()
    (tmp_path / "deadbeef" / "rank-00000.bin").write_bytes(b"half")
    save(tmp_path, {"w": torch.ones(4)})
    assert not (tmp_path / "deadbeef").exists() or not list((tmp_path / "deadbeef").iterdir())
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.ones(400)})
    data = next(tmp_path.rglob("*.bin"))
    raw = bytearray(data.read_bytes())
    raw[77] ^= 4
    data.write_bytes(raw)
    with pytest.raises(CheckpointException) as caught:
        load(tmp_path, {"w": torch.zeros(400)})
    assert "differs from its hash" in reasons(caught)


def test_what_torch_cannot_do_with_us_is_said(tmp_path: Path) -> None:
    planner = DefaultSavePlanner(enable_plan_caching=True)
    save(tmp_path / "1", {"w": torch.ones(4)}, planner=planner)
    with pytest.raises(CheckpointException) as caught:
        save(tmp_path / "2", {"w": torch.ones(4)}, planner=DefaultSavePlanner(enable_plan_caching=True))
    assert "enable_plan_caching=True does not go with FlextrainWriter" in reasons(caught)
    with pytest.raises(CheckpointError, match="use_collectives=False"):
        save(tmp_path / "3", {"w": torch.ones(4)}, use_collectives=False)
    with pytest.raises(CheckpointException) as caught:
        save(tmp_path / "4", {"w": torch.eye(3).to_sparse()})
    assert "convert it to a dense tensor" in reasons(caught)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_an_object_that_would_need_code_to_load_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException) as caught:
        save(tmp_path / "c", {"w": torch.ones(2), "object": Bomb(tmp_path / "ran")})
    assert "object holds a value that does not load without running code" in reasons(caught)
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "c" / "manifest.json").exists()


def tampered(place: Path, change: Any) -> None:
    """The manifest changed by somebody who seals it again."""
    path = place / "manifest.json"
    body = json.loads(unsealed(path.read_bytes()))
    change(body)
    path.write_bytes(sealed(json.dumps(body, separators=(",", ":")).encode()))


def test_a_hostile_value_never_runs(tmp_path: Path) -> None:
    raw = io.BytesIO()
    torch.save(Bomb(tmp_path / "ran"), raw)
    place = tmp_path / "c"
    save(place, {"value": torch.frombuffer(bytearray(raw.getvalue()), dtype=torch.uint8), "w": torch.ones(2)})
    tampered(place, lambda body: body["state"]["dcp"].update(bytes=["value"]))
    for attack in (lambda: load_all(place), lambda: load(place, {"value": 1, "w": torch.zeros(2)})):
        with pytest.raises(CheckpointException) as caught:
            attack()
        assert "does not load without running code" in reasons(caught)
        assert not (tmp_path / "ran").exists()
    torch.load(io.BytesIO(raw.getvalue()), weights_only=False)
    assert (tmp_path / "ran").exists(), "the bytes were harmless, so this test showed nothing"


HOSTILE = {
    "an object elsewhere": lambda body: body["tensors"]["w"]["shards"][0].update(object="../../secret/rank-00000.bin"),
    "an object above": lambda body: body["objects"].update({"../rank-00000.bin": {"size_bytes": 0, "chunks": []}}),
    "bytes that are none": lambda body: body["state"]["dcp"].update(bytes=["w"]),
    "bytes that are not there": lambda body: body["state"]["dcp"].update(bytes=["x"]),
    "a list as long as memory": lambda body: body["state"]["dcp"]["paths"].update(w=["w", 10**12]),
    "a path of objects": lambda body: body["state"]["dcp"]["paths"].update(w=[{"a": 1}]),
    "no paths": lambda body: body["state"]["dcp"].update(paths={}),
    "no record": lambda body: body["state"].update(dcp=[]),
    "a size that is not there": lambda body: [o.update(size_bytes=1 << 20) for o in body["objects"].values()],
    "numbers out of range": lambda body: body.update(step=float("inf")),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_hostile_metadata_are_refused(tmp_path: Path, how: str) -> None:
    save(tmp_path, {"w": torch.ones(4), "n": 3})
    tampered(tmp_path, HOSTILE[how])
    with pytest.raises(CheckpointException) as caught:
        load_all(tmp_path)
    assert any(text in reasons(caught) for text in ("not a sound manifest", "is unsound", "expected 1048576 bytes"))


def test_metadata_nested_without_end_are_refused(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.ones(4)})
    (tmp_path / "manifest.json").write_bytes(sealed(b'{"state":' + b"[" * 100_000 + b"}"))
    with pytest.raises(CheckpointException) as caught:
        load_all(tmp_path)
    assert "not a sound manifest" in reasons(caught)
