"""CheckpointManager: any nesting of tensors and JSON, on any tier, for those who write their own loop."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.forked import forked_writers
from tests.support.subject import _small_chunks
from torch import Tensor, nn

from flextrain.checkpoint import CheckpointConfig, CheckpointManager, CheckpointState, CheckpointTier, load_weights
from flextrain.checkpoint.tree import Flattener, unflatten
from flextrain.errors import CheckpointCorrupt, CheckpointError, CheckpointMismatch

__all__ = ["_small_chunks"]
MEMORY, NVME, S3 = CheckpointTier
KEYS = st.text(st.characters(categories=["L"]), min_size=1, max_size=3) | st.integers(0, 9)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.just("tensor")
NESTS = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner), max_leaves=9
)


@pytest.fixture
def config(tmp_path: Path, _small_chunks: None) -> Iterator[CheckpointConfig]:
    with forked_writers():
        yield CheckpointConfig(
            interval=10, memory_snapshot_interval=2, nvme_path=str(tmp_path / "disk"), storage=str(tmp_path / "store")
        )


@pytest.fixture
def manager(config: CheckpointConfig) -> Iterator[CheckpointManager]:
    with CheckpointManager(config) as made:
        yield made


def number(state: CheckpointState | None) -> float:
    assert state
    assert isinstance(state.model["weight"], Tensor)
    return float(state.model["weight"].flatten()[0])


def test_a_state_comes_back_from_every_tier(manager: CheckpointManager, config: CheckpointConfig) -> None:
    for step, tier in ((1, S3), (2, NVME), (3, MEMORY)):
        assert manager.save_checkpoint({"step": step, "model": {"weight": torch.full((5, 3), step)}}, tier) == tier
    manager.wait()
    other = CheckpointManager(config)
    assert (number(manager.load_checkpoint()), number(other.load_checkpoint())) == (3.0, 2.0)
    far = CheckpointManager(config.model_copy(update={"nvme_path": None}))
    assert number(far.load_checkpoint()) == 1.0


def test_nothing_to_load_is_no_error(manager: CheckpointManager) -> None:
    assert manager.load_checkpoint() is None


def test_intervals_say_how_far_a_step_goes(manager: CheckpointManager) -> None:
    assert [manager.due(step) for step in (1, 2, 10, 12, 20)] == [None, MEMORY, S3, MEMORY, S3]
    assert [manager.save_checkpoint(CheckpointState(step, {"weight": torch.ones(2)})) for step in (1, 2, 10)] == [
        None,
        MEMORY,
        S3,
    ]
    manager.wait()
    assert manager.catalog.steps() == [10]


def test_a_training_loop_goes_on_as_if_it_had_not_stopped(config: CheckpointConfig) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            model(torch.ones(4)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Linear(4, 4)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = make(0)
    train(model, optimizer, 3)
    with CheckpointManager(config) as manager:
        manager.save_checkpoint(CheckpointState(3, model.state_dict(), optimizer.state_dict()), S3)
        train(model, optimizer, 2)  # while it is being saved
    other, again = make(1)
    with CheckpointManager(config) as manager:
        found = manager.load_checkpoint()
    assert found
    other.load_state_dict(found.model)
    again.load_state_dict(found.optimizer)
    train(other, again, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


def test_tensors_are_filled_in_place_where_they_are_given(manager: CheckpointManager) -> None:
    manager.save_checkpoint(CheckpointState(1, {"weight": torch.arange(6.0)}, extra=("note", 7)), S3)
    manager.wait()
    weight = torch.zeros(6)
    found = manager.load_checkpoint(into={"step": 0, "model": {"weight": weight}})
    assert found
    assert found.extra == ("note", 7)
    assert found.model["weight"].data_ptr() == weight.data_ptr()
    assert weight.tolist() == list(range(6))


def test_a_load_does_not_touch_what_was_saved(manager: CheckpointManager) -> None:
    weight = torch.ones(4)
    manager.save_checkpoint(CheckpointState(1, {"weight": weight}), MEMORY)
    weight.fill_(9)
    found = manager.load_checkpoint()
    assert (number(found), float(weight[0])) == (1.0, 9.0)


def test_other_tensors_than_were_saved_are_refused(manager: CheckpointManager) -> None:
    manager.save_checkpoint(CheckpointState(1, {"weight": torch.ones(4)}), S3)
    manager.wait()
    with pytest.raises(CheckpointMismatch, match=r"model.weight is \[4\] in the checkpoint and \[5\] here"):
        manager.load_checkpoint(into=CheckpointState(0, {"weight": torch.ones(5)}))


def test_a_state_may_change_its_shape_and_its_memory(manager: CheckpointManager) -> None:
    for step, size in ((1, 3), (2, 3), (3, 8)):
        manager.save_checkpoint(CheckpointState(step, {"weight": torch.full((size,), step)}), S3)
        manager.wait()
        found = manager.load_checkpoint()
        assert found
        assert found.model["weight"].tolist() == [step] * size
    assert manager.catalog.steps() == [1, 2, 3]


def test_the_best_by_a_metric_stays(config: CheckpointConfig) -> None:
    settings = config.model_copy(update={"keep_last_n": 1, "keep_best_n": 1})
    with CheckpointManager(settings) as manager:
        for step, loss in ((1, 0.5), (2, 0.1), (3, 0.3)):
            manager.save_checkpoint(CheckpointState(step, {"w": torch.ones(1)}, metrics={"loss": loss}), S3)
            manager.wait()
        assert manager.catalog.steps() == [2, 3]
        found = manager.load_checkpoint()
    assert found
    assert found.metrics == {"loss": 0.3}


def test_the_weights_load_into_any_model_of_that_kind(manager: CheckpointManager) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    manager.save_checkpoint(CheckpointState(1, model.state_dict()), S3)
    manager.wait()
    load_weights(manager.catalog.url_of(1), other)
    assert torch.equal(model.weight, other.weight)


def test_what_cannot_be_saved_is_named(manager: CheckpointManager) -> None:
    with pytest.raises(CheckpointError, match=r"extra\.a\.1 is a set, which a checkpoint cannot hold"):
        manager.save_checkpoint(CheckpointState(1, extra={"a": [1, {2}]}), S3)
    with pytest.raises(CheckpointError, match=r"model is a tensor of layout torch\.sparse_coo"):
        manager.save_checkpoint(CheckpointState(1, torch.eye(2).to_sparse()), S3)
    with pytest.raises(CheckpointError, match="model is a tensor without data"):
        manager.save_checkpoint(CheckpointState(1, torch.ones(2, device="meta")), S3)
    with pytest.raises(CheckpointError, match=r"metrics\.loss is a Tensor"):
        manager.save_checkpoint(CheckpointState(1, {}, metrics={"loss": torch.ones(())}), S3)  # type: ignore[dict-item]
    twice = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}
    with pytest.raises(CheckpointError, match=r"two tensors would be called model\.a\.b"):
        manager.save_checkpoint(CheckpointState(1, twice), S3)


def test_a_mapping_has_the_keys_of_a_state(manager: CheckpointManager) -> None:
    with pytest.raises(CheckpointError, match="has the key 'modle', which it does not know"):
        manager.save_checkpoint({"step": 1, "modle": {}}, S3)
    with pytest.raises(CheckpointError, match="has no step"):
        manager.save_checkpoint({"model": {}}, S3)


def test_a_metric_may_be_called_anything(manager: CheckpointManager) -> None:
    manager.save_checkpoint(CheckpointState(1, {"w": torch.ones(1)}, metrics={"tree": 3.0, "loss": 1.0}), S3)
    found = manager.load_checkpoint()
    assert found
    assert found.metrics == {"tree": 3.0, "loss": 1.0}


def test_another_programs_checkpoint_is_refused(manager: CheckpointManager, tmp_path: Path) -> None:
    from flextrain.checkpoint import Catalog, CheckpointSaver
    from flextrain.storage import open_store

    model = nn.Linear(2, 2)
    saver = CheckpointSaver(Catalog(open_store(tmp_path / "store")), model, torch.optim.SGD(model.parameters()))
    saver.save(1, {})
    saver.close()
    with pytest.raises(CheckpointMismatch, match="was not saved by CheckpointManager"):
        manager.load_checkpoint()


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and (a == b or (isinstance(a, float) and math.isinf(a) and a == b))


def with_tensors(nest: Any) -> Any:
    if isinstance(nest, dict):
        return {key: with_tensors(item) for key, item in nest.items()}
    if isinstance(nest, list | tuple):
        return type(nest)(map(with_tensors, nest))
    return torch.rand(2) if nest == "tensor" else nest


@given(NESTS)
def test_any_nesting_comes_back(nest: Any) -> None:
    import json

    value, flat = with_tensors(nest), Flattener()
    tree = json.loads(json.dumps(flat.take(value, "x")))
    assert equal(unflatten(tree, flat.state, "here"), value)


def test_a_tensor_in_two_places_is_one() -> None:
    shared, flat = torch.ones(3), Flattener()
    tree = flat.take({"a": shared, "b": shared, "c": shared[:2], "d": torch.ones(3)}, "x")
    assert list(flat.state) == ["x.a", "x.c", "x.d"]
    found = unflatten(tree, flat.state, "here")
    assert found["a"] is found["b"]


@pytest.mark.parametrize(
    "tree",
    [[], {}, {"tensor": "x.z"}, {"tensor": []}, {"code": []}, {"dict": [1]}, {"dict": [[[], 1]]}, {"a": 1, "b": 2}],
)
def test_a_hostile_record_is_refused(tree: Any) -> None:
    with pytest.raises(CheckpointCorrupt, match="is unsound"):
        unflatten(tree, {"x.a": torch.ones(1)}, "here")
