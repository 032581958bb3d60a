"""A checkpoint in several places: every chunk comes from the nearest that has it sound, and nothing from elsewhere."""

import errno
import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.seeds import seeded
from tests.support.subject import CHUNK_BYTES, Subject, Tiny, _small_chunks, root

from flextrain.checkpoint.catalog import check_objects
from flextrain.checkpoint.manifest import Manifest
from flextrain.checkpoint.reader import load_weights, read_into, verify
from flextrain.checkpoint.shards import model_state
from flextrain.errors import CheckpointCorrupt, StorageError
from flextrain.storage import Store, open_store

__all__ = ["_small_chunks", "root"]
pytestmark = pytest.mark.usefixtures("_small_chunks")
STEP = "step-00000001"


class Copies:
    """One checkpoint in `count` places, the last of them an object store; `load` reads it into a fresh model."""

    def __init__(self, root: Path, count: int = 2, seed: int = 0) -> None:
        self.subject = Subject(root / "0", seed)
        self.subject.save(1)
        self.manifest: Manifest = self.subject.catalog.manifest(1)
        [(self.name, self.entry)] = self.manifest.objects.items()
        self.raw = (root / "0" / STEP / self.name).read_bytes()
        for index in range(1, count - 1):
            shutil.copytree(root / "0", root / str(index))
        self.files = [root / str(index) / STEP / self.name for index in range(count - 1)]
        self.store = open_store("memory://bucket").child(STEP)
        self.store.put(self.name, self.raw)
        self.places: list[Store] = [open_store(file.parents[1]) for file in self.files] + [self.store]

    def put(self, place: int, raw: bytes) -> None:
        self.files[place].write_bytes(raw) if place < len(self.files) else self.store.put(self.name, raw)

    def load(self, places: list[Store] | None = None) -> Tiny:
        model = Tiny(len(self.subject.model.wide))
        read_into(places or self.places, self.manifest, model_state(model))
        return model

    def check(self) -> None:
        expected = model_state(self.subject.model)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in model_state(self.load()).items())
        verify(self.places, self.manifest)


@seeded(200, sample=10)
def test_any_damage_that_leaves_every_chunk_sound_somewhere_costs_nothing(root: Path, seed: int) -> None:
    rng = random.Random(seed)
    copies = Copies(root, rng.randint(2, 4), seed)
    bad: list[set[int]] = []
    for place in range(len(copies.places)):
        count = len(copies.entry.chunks)
        bad.append({chunk for chunk in range(count) if rng.random() < 0.4})
        raw = bytearray(copies.raw)
        for chunk in bad[-1]:
            raw[rng.randrange(chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, len(raw)))] ^= 1 << rng.randrange(8)
        copies.put(place, bytes(raw))
    if set.intersection(*bad):
        with pytest.raises(CheckpointCorrupt, match="differs from its hash"):
            copies.load()
    else:
        copies.check()


def lose(path: Path) -> None:
    path.unlink()


def lose_folder(path: Path) -> None:
    shutil.rmtree(path.parents[2])


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path) -> None:
    path.rename(path.parents[2] / "elsewhere.bin")
    path.symlink_to(path.parents[2] / "elsewhere.bin")


def link_folder(path: Path) -> None:
    path.parent.rename(path.parents[2] / "elsewhere")
    path.parent.symlink_to(path.parents[2] / "elsewhere")


LOSSES = {
    lose: "No such file",
    lose_folder: "No such file",
    cut: "bytes, expected",
    extend: "bytes, expected",
    make_folder: "is no file",
    make_pipe: "is no file",
    link: "symbolic link",
    link_folder: "symbolic link",
}


@pytest.mark.parametrize("how", LOSSES, ids=lambda how: how.__name__)
def test_a_lost_object_comes_from_the_next_place_and_is_spoken_of_once(
    tmp_path: Path, how: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    copies = Copies(tmp_path)
    assert len(copies.entry.chunks) > 1
    how(copies.files[0])
    with caplog.at_level(logging.WARNING):
        copies.load()
    if how in (lose, lose_folder):
        assert caplog.messages == [], "a nearer place need not have everything"
    else:
        [line] = caplog.messages
        assert LOSSES[how] in line
        assert str(copies.files[0]) in line
    copies.check()
    with pytest.raises(CheckpointCorrupt, match=LOSSES[how]):
        copies.load(copies.places[:1])


def test_an_object_behind_a_link_is_refused_even_alone(tmp_path: Path) -> None:
    copies = Copies(tmp_path)
    link(copies.files[0])
    with pytest.raises(CheckpointCorrupt, match="symbolic link"):
        load_weights(str(copies.files[0].parents[1]), Tiny(len(copies.subject.model.wide)))


@pytest.mark.parametrize("how", [make_pipe, make_folder, link], ids=lambda how: how.__name__)
def test_a_manifest_that_is_no_file_is_refused(tmp_path: Path, how: Callable[[Path], None]) -> None:
    copies = Copies(tmp_path)
    step = copies.files[0].parents[1]
    (step / "deep" / "deeper").mkdir(parents=True)
    how((step / "manifest.json").rename(step / "deep" / "deeper" / "manifest.json"))
    (step / "deep" / "deeper" / "manifest.json").rename(step / "manifest.json")
    with pytest.raises(CheckpointCorrupt, match="is no file of its own"):
        load_weights(str(step), Tiny(len(copies.subject.model.wide)))


def test_a_bad_block_costs_one_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies(tmp_path)
    preadv, stream_range = os.preadv, Store.stream_range
    fetched: list[int] = []

    def ailing(fd: int, views: Any, start: int) -> int:
        if start == CHUNK_BYTES:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, views, start)

    def counted(store: Store, key: str, start: int, length: int) -> Iterator[bytes]:
        fetched.append(start)
        return stream_range(store, key, start, length)

    monkeypatch.setattr(os, "preadv", ailing)
    monkeypatch.setattr(Store, "stream_range", counted)
    copies.load()
    assert fetched == [CHUNK_BYTES]


def test_a_place_that_ails_is_not_taken_for_a_bad_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies(tmp_path)

    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "preadv", refuse)
    copies.check()
    copies.put(1, b"damaged")
    with pytest.raises(StorageError, match="Permission denied"):
        copies.load()


def test_objects_count_as_there_where_some_place_has_them_whole(tmp_path: Path) -> None:
    copies = Copies(tmp_path, count=3)
    cut(copies.files[0])
    copies.store.delete([copies.name])
    check_objects(copies.places, copies.manifest)
    lose(copies.files[1])
    with pytest.raises(CheckpointCorrupt, match=r"memory://bucket/.* is missing, expected"):
        check_objects(copies.places, copies.manifest)
    with pytest.raises(CheckpointCorrupt, match=r"has \d+ bytes, expected"):
        check_objects(copies.places[0], copies.manifest)


def test_a_further_place_is_asked_only_for_what_is_lacking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies(tmp_path)
    unreachable = open_store("memory://elsewhere")

    def refuse(*_: object) -> Any:
        raise StorageError("the store is down", number=4)

    for name in ("list", "stream_range", "size"):
        monkeypatch.setattr(unreachable, name, refuse)
    copies.places[1] = unreachable
    check_objects(copies.places, copies.manifest)
    copies.check()
    lose(copies.files[0])
    with pytest.raises(StorageError, match="the store is down"):
        check_objects(copies.places, copies.manifest)
    with pytest.raises(StorageError, match="the store is down"):
        copies.load()
