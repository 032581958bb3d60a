"""What counts as a checkpoint, and where it is found, for any listing of objects."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flextrain.checkpoint import survey as module
from flextrain.checkpoint.survey import committed_below, newest_below, survey
from flextrain.errors import CheckpointError
from flextrain.storage import Store, open_store


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    """A bucket in memory, found again by every open."""
    bucket = open_store("memory://b")
    monkeypatch.setattr(
        module, "open_store", lambda url: bucket.child(url.removeprefix("memory://b").strip("/")) if url else bucket
    )
    return bucket


def put(store: Store, *keys: str) -> None:
    for key in keys:
        store.put(key, b"12")


def test_folders_are_told_by_their_parts_and_steps_by_their_names(store: Store) -> None:
    put(store, "x/r/checkpoints/step-00000003/a1/rank-00000.bin", "x/r/checkpoints/step-00000003/manifest.json")
    put(store, "x/r/checkpoints/step-00000004/a2/rank-00001.part", "x/r/checkpoints/.spare/a-rank-00000.bin")
    put(store, "x/epoch/a3/rank-00000.bin", "x/epoch/manifest.json", "x/r/events/rank-00000.f00.jsonl")
    put(store, "x/index/manifest.json", "x/index/train-00000.bin", "x/r/checkpoints/step-00000009/manifest.json")
    found = {one.name: (one.step, one.committed, one.size_bytes) for one in survey("memory://b/x")}
    assert found == {
        "epoch": (None, True, 4),
        "r/checkpoints/step-00000003": (3, True, 4),
        "r/checkpoints/step-00000004": (4, False, 2),
        "r/checkpoints/step-00000009": (9, True, 2),
    }


@pytest.mark.parametrize("place", ["memory://b/r/step-00000003", "memory://b/r/epoch", "memory://b/r/step-00000009"])
def test_a_checkpoint_finds_itself(store: Store, place: str) -> None:
    for name in ("step-00000003", "epoch"):
        put(store, f"r/{name}/a1/rank-00000.bin", f"r/{name}/manifest.json")
    put(store, "r/step-00000009/manifest.json")
    [found] = survey(place)
    assert (found.url, found.root, found.committed) == (place, "memory://b/r", True)


def test_the_newest_is_the_one_committed_last(store: Store) -> None:
    put(store, "b/step-00000009/a/rank-00000.bin", "b/step-00000009/manifest.json")
    put(store, "a/step-00000002/a/rank-00000.bin", "a/step-00000002/manifest.json", "a/step-00000003/a/rank-00000.bin")
    assert newest_below("memory://b").name == "a/step-00000002"
    with pytest.raises(CheckpointError, match="no committed checkpoint"):
        committed_below("memory://b/a/step-00000003")


@given(st.lists(st.sampled_from(["manifest.json", "rank-00000.bin", "step-00000001", "a", "s3"]), max_size=6))
def test_no_key_confuses_it(parts: list[str]) -> None:
    folder = module._folder_of("/".join(parts))
    assert folder is None or "/".join(parts).startswith(folder)
