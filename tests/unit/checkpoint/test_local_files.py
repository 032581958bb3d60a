"""Objects of a local folder: written and read piece by piece by several threads at once."""

import errno
import os
import random
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flextrain.checkpoint import chunks, manifest, persist, sources
from flextrain.checkpoint.chunks import Chunks, Parts, Target
from flextrain.checkpoint.manifest import ObjectEntry
from flextrain.errors import CheckpointCorrupt
from flextrain.storage import open_store

NAME = "attempt/rank-00000.bin"
PIECE_BYTES, CACHED_PIECE_BYTES, CHUNK_BYTES = 8192, 4096, 5 * 8192


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (manifest, persist, chunks, sources):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK_BYTES)
    for module in (persist, sources):
        monkeypatch.setattr(module, "PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(sources, "CACHED_PIECE_BYTES", CACHED_PIECE_BYTES)


def saved(folder: Path, size_bytes: int, spare: bytes = b"") -> tuple[ObjectEntry, bytes]:
    """Persist random bytes as object NAME, over a spare file if there is to be one."""
    data = random.Random(size_bytes).randbytes(size_bytes)
    if spare:
        (folder / persist.SPARES).mkdir(exist_ok=True)
        (folder / persist.SPARES / "old").write_bytes(spare)
    root = open_store(folder)
    return persist.persist(root, root, NAME, memoryview(data), size_bytes), data


def loaded(folder: Path, entry: ObjectEntry, *, cached: bool) -> bytes:
    into = np.zeros(entry.size_bytes, np.uint8)
    with Chunks(open_store(folder), NAME, entry, cached=cached) as found:
        parts = Parts([Target(0, entry.size_bytes, into)])
        found.scatter(parts, list(parts))
    return into.tobytes()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(size_bytes=st.integers(1, 12 * CHUNK_BYTES), spare_bytes=st.integers(0, 14 * CHUNK_BYTES), cached=st.booleans())
def test_what_is_written_is_read(tmp_path: Path, size_bytes: int, spare_bytes: int, cached: bool) -> None:
    entry, data = saved(tmp_path, size_bytes, spare=b"x" * spare_bytes)
    assert (tmp_path / NAME).read_bytes() == data  # and from now on it is in the page cache
    starts = range(0, size_bytes, CHUNK_BYTES)
    assert entry == ObjectEntry(size_bytes, tuple(xxhash.xxh3_64_hexdigest(data[s : s + CHUNK_BYTES]) for s in starts))
    assert loaded(tmp_path, entry, cached=cached) == data


def test_a_piece_that_cannot_be_written_fails_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, at = os.pwrite, 7 * PIECE_BYTES

    def fail(fd: int, data: memoryview, offset: int) -> int:
        if offset == at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(fd, data, offset)

    monkeypatch.setattr(persist.os, "pwrite", fail)
    with pytest.raises(OSError, match="Input/output"):
        saved(tmp_path, 9 * CHUNK_BYTES)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_writes_that_stop_short_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(persist.os, "pwrite", lambda fd, data, offset: write(fd, data[:4096], offset))
    _, data = saved(tmp_path, 3 * CHUNK_BYTES + 100)
    assert (tmp_path / NAME).read_bytes() == data


@pytest.mark.parametrize("bad", range(5))
def test_a_chunk_that_cannot_be_read_harms_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: int) -> None:
    entry, data = saved(tmp_path, 8 * CHUNK_BYTES)
    read = os.preadv

    def fail(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset == bad * PIECE_BYTES:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(fd, buffers, offset)

    monkeypatch.setattr(sources.os, "preadv", fail)
    into = np.zeros(entry.size_bytes, np.uint8)
    with Chunks(open_store(tmp_path), NAME, entry, cached=False) as found:
        for index in range(8):
            parts = Parts([Target(index * CHUNK_BYTES, CHUNK_BYTES, into[index * CHUNK_BYTES :][:CHUNK_BYTES])])
            if index == 0:
                with pytest.raises(CheckpointCorrupt, match="Input/output"):
                    found.scatter(parts, list(parts))
            else:
                found.scatter(parts, list(parts))
    assert into[CHUNK_BYTES:].tobytes() == data[CHUNK_BYTES:]
