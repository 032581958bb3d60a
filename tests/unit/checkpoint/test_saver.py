"""Saving and resuming in one process: exact, verified, falling back, and never endangering what was committed."""

import errno
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from flextrain.checkpoint import Catalog, CheckpointSaver, Keep, load_weights, newest_checkpoint
from flextrain.checkpoint.manifest import CHUNK_BYTES
from flextrain.errors import CheckpointCorrupt, CheckpointError, CheckpointMismatch, StorageError
from flextrain.storage import open_store


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.norm = nn.BatchNorm1d(width)  # has buffers, one of them a 0-d int64
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embed.weight  # tied


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model.norm(model.embed(torch.arange(8))).pow(2).sum().backward()  # type: ignore[operator, union-attr]
        optimizer.step()
        optimizer.zero_grad()


Made = tuple[CheckpointSaver, nn.Module, torch.optim.Optimizer]


def make(root: Path, seed: int = 0, width: int = 8, keep: int = 3) -> Made:
    torch.manual_seed(seed)
    model = Net(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return CheckpointSaver(Catalog(open_store(root)), model, optimizer, Keep(keep)), model, optimizer


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [value for parameter in model.parameters() for value in optimizer.state[parameter].values()]
    return [*model.state_dict().values(), *moments]


def test_a_checkpoint_restores_every_bit_into_a_fresh_process(tmp_path: Path) -> None:
    saver, model, optimizer = make(tmp_path)
    train(model, optimizer, 3)
    saved = saver.save(3, {"position": 48, "note": "hello"})
    other, model2, optimizer2 = make(tmp_path, seed=1)
    manifest = other.resume()
    assert manifest == saved
    assert manifest.state["position"] == 48
    for a, b in zip(everything(model, optimizer), everything(model2, optimizer2), strict=True):
        assert torch.equal(a, b)
    assert "model.head.weight" not in manifest.tensors, "tied weights are saved once"


def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    saver, model, optimizer = make(tmp_path)
    train(model, optimizer, 3)
    saver.save(3, {})
    train(model, optimizer, 2)
    other, model2, optimizer2 = make(tmp_path, seed=1)
    other.resume()
    train(model2, optimizer2, 2)
    for a, b in zip(everything(model, optimizer), everything(model2, optimizer2), strict=True):
        assert torch.equal(a, b)


def test_nothing_to_resume_from_is_no_error(tmp_path: Path) -> None:
    assert make(tmp_path)[0].resume() is None
    assert list(tmp_path.iterdir()) == []


def corrupt(path: Path, how: str) -> None:
    raw = bytearray(path.read_bytes())
    if how == "flip":
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
    elif how == "truncate":
        path.write_bytes(raw[:-1])
    elif how == "extend":
        path.write_bytes(raw + b"x")
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["flip", "truncate", "extend", "delete"])
@pytest.mark.parametrize("what", ["*/rank-00000.bin", "manifest.json"])
def test_an_unsound_checkpoint_gives_way_to_the_one_before(tmp_path: Path, how: str, what: str) -> None:
    saver, model, optimizer = make(tmp_path)
    train(model, optimizer, 1)
    saver.save(1, {})
    before = [tensor.clone() for tensor in everything(model, optimizer)]
    train(model, optimizer, 1)
    saver.save(2, {})
    corrupt(next((tmp_path / "step-00000002").glob(what)), how)
    other, model2, optimizer2 = make(tmp_path, seed=1)
    manifest = other.resume()
    assert manifest is not None
    assert manifest.step == 1
    for a, b in zip(before, everything(model2, optimizer2), strict=True):
        assert torch.equal(a, b)
    other.save(2, {})  # the step is free again
    assert Catalog(open_store(tmp_path)).steps() == [1, 2]


def test_a_run_without_any_sound_checkpoint_does_not_train_on_spoilt_weights(tmp_path: Path) -> None:
    saver, model, optimizer = make(tmp_path)
    for step in (1, 2):
        train(model, optimizer, 1)
        saver.save(step, {})
    for data in tmp_path.glob("step-*/*/rank-00000.bin"):
        corrupt(data, "flip")
    with pytest.raises(CheckpointCorrupt, match="the weights are not what training begins with"):
        make(tmp_path, seed=1)[0].resume()
    assert make(tmp_path)[0].resume() is None, "both are set aside: now it begins anew"


def test_a_manifest_of_another_step_is_not_believed(tmp_path: Path) -> None:
    saver, model, optimizer = make(tmp_path)
    for step in (1, 2):
        train(model, optimizer, 1)
        saver.save(step, {})
    older, newer = (tmp_path / f"step-0000000{step}" / "manifest.json" for step in (1, 2))
    older.write_bytes(newer.read_bytes())
    with pytest.raises(CheckpointCorrupt, match="is that of step 2"):
        saver.catalog.manifest(1)
    assert saver.catalog.manifest(2).step == 2


def test_manifests_that_are_unsound_spoil_no_weights(tmp_path: Path) -> None:
    saver, model, optimizer = make(tmp_path)
    train(model, optimizer, 1)
    saver.save(1, {})
    corrupt(tmp_path / "step-00000001" / "manifest.json", "flip")
    other, model2, _ = make(tmp_path, seed=1)
    before = [tensor.clone() for tensor in model2.state_dict().values()]
    assert other.resume() is None
    assert all(torch.equal(a, b) for a, b in zip(before, model2.state_dict().values(), strict=True))


def test_every_single_bit_flip_in_the_data_is_found(tmp_path: Path) -> None:
    saver, model, optimizer = make(tmp_path)
    train(model, optimizer, 1)
    saver.save(1, {})
    data = next(tmp_path.glob("step-00000001/*/rank-00000.bin"))
    raw = data.read_bytes()
    for position in range(0, len(raw), 97):
        flipped = bytearray(raw)
        flipped[position] ^= 0x10
        data.write_bytes(flipped)
        with pytest.raises(CheckpointCorrupt, match=r"rank-00000\.bin differs from its hash"):
            saver.load(saver.catalog, 1)
    data.write_bytes(raw)
    saver.load(saver.catalog, 1)


def test_a_checkpoint_of_another_model_is_refused_not_set_aside(tmp_path: Path) -> None:
    saver, model, optimizer = make(tmp_path, width=8)
    train(model, optimizer, 1)
    saver.save(1, {})
    other, _, _ = make(tmp_path, width=4)
    with pytest.raises(CheckpointMismatch, match=r"model\.embed\.weight is \[16, 8\] in the checkpoint"):
        other.resume()
    assert Catalog(open_store(tmp_path)).steps() == [1]


def test_weights_alone_can_be_loaded_without_an_optimizer(tmp_path: Path) -> None:
    saver, model, optimizer = make(tmp_path)
    train(model, optimizer, 2)
    saver.save(2, {"position": 7})
    fresh = Net()
    assert load_weights(saver.catalog.url_of(2), fresh) == {"position": 7}
    assert torch.equal(fresh.embed.weight, model.embed.weight)  # type: ignore[arg-type, union-attr]
    with pytest.raises(CheckpointError, match="holds no committed checkpoint"):
        load_weights(str(tmp_path / "step-00000009"), fresh)


def test_a_second_writer_of_a_step_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    saver, model, optimizer = make(tmp_path)
    train(model, optimizer, 1)
    first = saver.save(1, {})
    other, model2, optimizer2 = make(tmp_path, seed=1)
    train(model2, optimizer2, 1)
    with pytest.raises(CheckpointError, match="was committed by another attempt"):
        other.save(1, {})
    assert other.resume() == first


def test_retention_keeps_the_newest_and_clears_leftovers(tmp_path: Path) -> None:
    saver, model, optimizer = make(tmp_path, keep=2)
    train(model, optimizer, 1)
    saver.save(1, {})
    leftover = tmp_path / "step-00000001" / "deadbeef" / "rank-00000.bin"
    leftover.parent.mkdir()
    leftover.write_bytes(b"half a checkpoint")
    for step in (2, 3):
        saver.save(step, {})
    assert saver.catalog.steps() == [2, 3]
    assert not [path for path in tmp_path.glob("step-00000001/**/*") if path.is_file()]


def test_tensors_larger_than_a_chunk_cross_its_border(tmp_path: Path) -> None:
    model = nn.Linear(1024, 3 * CHUNK_BYTES // 8192 + 5, bias=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saver = CheckpointSaver(Catalog(open_store(tmp_path)), model, optimizer)
    manifest = saver.save(1, {})
    assert max(len(entry.chunks) for entry in manifest.objects.values()) > 1
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    saver.resume()
    assert torch.equal(model.weight, weight)
    assert torch.equal(model.bias, bias)


def test_the_newest_checkpoint_of_an_experiment_is_the_last_committed(tmp_path: Path) -> None:
    assert newest_checkpoint(str(tmp_path)) is None
    for run, step in (("run-a", 9), ("run-b", 4)):
        saver, model, optimizer = make(tmp_path / run / "checkpoints")
        train(model, optimizer, 1)
        saver.save(step, {})
    assert newest_checkpoint(str(tmp_path)) == str(tmp_path / "run-b" / "checkpoints" / "step-00000004")


def test_a_store_that_refuses_is_not_taken_for_corruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver, model, optimizer = make(tmp_path)
    train(model, optimizer, 1)
    saver.save(1, {})

    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", refuse)
        with pytest.raises(StorageError, match="Permission denied"):
            make(tmp_path)[0].resume()
    assert Catalog(open_store(tmp_path)).steps() == [1]


def test_a_named_checkpoint_that_is_unsound_gives_way_and_its_run_is_left_alone(tmp_path: Path) -> None:
    saver, model, optimizer = make(tmp_path / "old")
    for step in (1, 2):
        train(model, optimizer, 1)
        saver.save(step, {})
    corrupt(next((tmp_path / "old" / "step-00000002").glob("*/rank-00000.bin")), "flip")
    fresh, _, _ = make(tmp_path / "new", seed=1)
    manifest, url = fresh.resume_from(saver.catalog.url_of(2))
    assert (manifest.step, url) == (1, saver.catalog.url_of(1))
    assert saver.catalog.steps() == [1, 2]


def test_retention_that_fails_does_not_undo_a_commit(tmp_path: Path) -> None:
    saver, model, optimizer = make(tmp_path, keep=2)
    train(model, optimizer, 1)
    saver.save(1, {})
    other = tmp_path / "step-00000001" / "deadbeef" / "rank-00000.bin"
    other.parent.mkdir()
    other.write_bytes(b"x")
    (tmp_path / "step-00000001" / "manifest.json").write_bytes(b"{")
    saver.save(2, {})
    assert saver.catalog.steps() == [1, 2]


def test_a_checkpoint_in_the_page_cache_loads_alike_and_is_verified_too(tmp_path: Path) -> None:
    saver, model, optimizer = make(tmp_path, width=100_000)  # more than a chunk
    train(model, optimizer, 1)
    saver.save(1, {})
    (data,) = tmp_path.rglob("*.bin")
    content = bytearray(data.read_bytes())  # now it is cached
    other, model2, optimizer2 = make(tmp_path, seed=1, width=100_000)
    other.load(other.catalog, 1)
    for a, b in zip(everything(model, optimizer), everything(model2, optimizer2), strict=True):
        assert torch.equal(a, b)
    assert len(content) > CHUNK_BYTES
    content[CHUNK_BYTES + 5] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointCorrupt, match="differs from its hash"):
        other.load(other.catalog, 1)
