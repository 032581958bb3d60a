"""What a catalog keeps besides the newest checkpoints: every k-th and the best, by what their manifests say."""

from pathlib import Path

import pytest
import torch
from tests.support.saved import save_now
from tests.support.tiny import Recorder, tiny_config, train_tiny
from torch import nn

from flextrain.checkpoint import Catalog, CheckpointSaver, Keep
from flextrain.errors import CheckpointError
from flextrain.storage import Store, open_store

LOSSES = {1: 3.0, 2: 1.0, 3: float("nan"), 4: 2.0, 5: 1.5, 6: 4.0}


def fill(root: Path, losses: dict[int, float]) -> Catalog:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    for step, loss in losses.items():
        save_now(root, model, optimizer, step, {"loss": loss, "accuracy": -loss})
    return Catalog(open_store(root))


@pytest.fixture
def manifests_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """URLs of the manifests that are read, as they are."""
    read: list[str] = []
    real = Store.get

    def get(store: Store, key: str) -> bytes:
        if key == "manifest.json":
            read.append(store.url_of(key))
        return real(store, key)

    monkeypatch.setattr(Store, "get", get)
    return read


def test_the_best_and_every_kth_outlive_newer_ones(tmp_path: Path) -> None:
    catalog = fill(tmp_path, LOSSES)
    assert catalog.retire(Keep(1, every=3, best_n=2)) == [1, 4]
    assert catalog.retire(Keep(1, every=3, best_n=2)) == []
    assert catalog.retire(Keep(1, best_n=1, metric="accuracy", mode="max")) == [3, 5]
    assert catalog.steps() == [2, 6]


def test_a_manifest_is_read_once_and_only_where_the_best_are_asked_for(
    tmp_path: Path, manifests_read: list[str]
) -> None:
    catalog = fill(tmp_path, LOSSES)
    manifests_read.clear()
    catalog.doomed(Keep(2, every=2))
    assert manifests_read == []
    for _ in range(3):
        Catalog(open_store(tmp_path)).doomed(Keep(1, best_n=1))
    assert sorted(manifests_read) == [f"{catalog.url_of(step)}/manifest.json" for step in LOSSES]


def test_an_unsound_manifest_is_never_among_the_best(tmp_path: Path) -> None:
    catalog = fill(tmp_path, LOSSES)
    (tmp_path / "step-00000002" / "manifest.json").write_bytes(b"{")
    assert catalog.retire(Keep(1, best_n=1)) == [1, 2, 3, 4]


def test_a_manifest_that_cannot_be_read_now_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = fill(tmp_path, LOSSES)
    with monkeypatch.context() as patched:
        patched.setattr("flextrain.checkpoint.catalog.read_manifest", lambda folder: folder.get("elsewhere"))
        with pytest.raises(OSError, match="does not exist"):
            catalog.retire(Keep(1, best_n=1))
    assert catalog.steps() == list(LOSSES)


def test_a_metric_that_no_checkpoint_has_deletes_nothing(tmp_path: Path) -> None:
    catalog = fill(tmp_path, LOSSES)
    with pytest.raises(CheckpointError, match=r"'los', which.*\n.*accuracy, loss"):
        catalog.retire(Keep(1, best_n=1, metric="los"))
    assert catalog.steps() == list(LOSSES)


def test_a_saver_keeps_what_it_is_told(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    keep = Keep(1, every=4, best_n=1)
    saver = CheckpointSaver(Catalog(open_store(tmp_path)), model, torch.optim.SGD(model.parameters()), keep)
    for step, loss in LOSSES.items():
        saver.save(step, {"loss": loss})
    saver.close()
    assert saver.catalog.steps() == [2, 4, 6]
    with pytest.raises(CheckpointError, match="no number in their state"):
        saver.snapshot(7, {"position": 1, "loss": "low"})


def test_training_is_told_of_an_unknown_metric_before_its_first_step(tmp_path: Path) -> None:
    recorder = Recorder()
    config = tiny_config(checkpoint={"keep_best_n": 1, "keep_best_metric": "val_loss"})
    with pytest.raises(CheckpointError, match="the numbers there are: loss, position, tokens"):
        train_tiny(tmp_path, config, [recorder])
    assert recorder.rows == []


def test_training_keeps_the_best(tmp_path: Path) -> None:
    settings = {"interval": 1, "keep_last_n": 1, "keep_every": 5, "keep_best_n": 1, "keep_best_metric": "tokens"}
    recorder = Recorder()
    train_tiny(
        tmp_path, tiny_config(training={"max_steps": 7, "global_batch_size": 10}, checkpoint=settings), [recorder]
    )
    assert len(recorder.rows) == 7
    assert Catalog(open_store(tmp_path / "checkpoints")).steps() == [1, 5, 7]
