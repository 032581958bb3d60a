"""Uploads: from memory in parts, hashed, whole or not at all, no faster than allowed."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import xxhash
from obstore.exceptions import PermissionDeniedError
from tests.support.s3 import Bucket, bucket, s3_endpoint

from flextrain.checkpoint import transfer
from flextrain.checkpoint.transfer import Bandwidth, upload
from flextrain.errors import StorageError
from flextrain.storage import Store, open_store, store

__all__ = ["bucket", "s3_endpoint"]
CHUNK = 3 << 20
SIZE = 41 * (1 << 20) + 17


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture(params=["memory", "s3"])
def folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(transfer, "_pause", lambda seconds: None)
    if request.param == "memory":
        return open_store("memory://bucket").child("run")
    made: Bucket = request.getfixturevalue("bucket")
    for name, value in made.environ.items():
        monkeypatch.setenv(name, value)
    return open_store(f"{made.url}/run")


def content() -> bytearray:
    return bytearray(range(251)) * (SIZE // 251 + 1)


def test_what_is_uploaded_comes_back_and_every_chunk_has_its_hash(folder: Store) -> None:
    data = content()
    entry = upload(folder, "a/rank-00000.bin", memoryview(data), SIZE)
    assert folder.get("a/rank-00000.bin") == data[:SIZE]
    chunks = [data[at : min(at + CHUNK, SIZE)] for at in range(0, SIZE, CHUNK)]
    assert (entry.size_bytes, entry.chunks) == (SIZE, tuple(xxhash.xxh3_64_hexdigest(chunk) for chunk in chunks))


@pytest.mark.parametrize("size_bytes", [0, 1, 5000])
def test_a_small_object_is_one_request(folder: Store, size_bytes: int) -> None:
    data = content()
    upload(folder, "small", memoryview(data), size_bytes)
    assert folder.get("small") == data[:size_bytes]


def test_an_upload_that_breaks_off_leaves_nothing(folder: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, tries = folder.put_stream, []

    def torn(key: str, chunks: Iterator[Any], size_bytes: int) -> None:
        def some() -> Iterator[Any]:
            for count, chunk in enumerate(chunks):
                if count == 9:
                    raise StorageError("the line is dead", number=4)
                yield chunk

        tries.append(key)
        whole(key, some(), size_bytes)

    monkeypatch.setattr(folder, "put_stream", torn)
    with pytest.raises(StorageError, match="the line is dead"):
        upload(folder, "torn", memoryview(content()), SIZE)
    assert (len(tries), folder.list()) == (3, [])


@pytest.mark.parametrize("cause", [PermissionDeniedError("403"), FileNotFoundError("no such bucket")])
def test_a_refusal_is_final(folder: Store, monkeypatch: pytest.MonkeyPatch, cause: Exception) -> None:
    tries = []

    def refused(key: str, chunks: Iterator[Any], size_bytes: int) -> None:
        tries.append(key)
        raise StorageError("no access", number=4) from cause

    monkeypatch.setattr(folder, "put_stream", refused)
    with pytest.raises(StorageError, match="no access"):
        upload(folder, "refused", memoryview(content()), SIZE)
    assert len(tries) == 1


def test_an_answer_that_was_lost_is_looked_up(folder: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, tries = folder.put_stream, []

    def unheard(key: str, chunks: Iterator[Any], size_bytes: int) -> None:
        tries.append(key)
        whole(key, chunks, size_bytes)
        raise StorageError("no answer", number=4)

    monkeypatch.setattr(folder, "put_stream", unheard)
    data = content()
    entry = upload(folder, "there", memoryview(data), SIZE)
    assert (len(tries), len(entry.chunks), folder.get("there")) == (1, -(-SIZE // CHUNK), data[:SIZE])


def test_an_object_of_an_earlier_life_does_not_stand_in_for_hashes(
    folder: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = content()
    upload(folder, "there", memoryview(data), SIZE)
    whole, tries = folder.put_stream, []

    def deaf(key: str, chunks: Iterator[Any], size_bytes: int) -> None:
        tries.append(key)
        if len(tries) == 1:
            next(chunks)
            raise StorageError("no answer", number=4)
        whole(key, chunks, size_bytes)

    monkeypatch.setattr(folder, "put_stream", deaf)
    entry = upload(folder, "there", memoryview(data), SIZE)
    assert (len(tries), len(entry.chunks)) == (2, -(-SIZE // CHUNK))


@pytest.mark.parametrize(
    ("size_mb", "part_bytes"), [(33, 32 << 20), (320_000, 32 << 20), (320_001, 33554537), (5_000_000, 524_288_000)]
)
def test_parts_grow_with_the_object_so_that_no_more_than_ten_thousand_are_needed(
    monkeypatch: pytest.MonkeyPatch, size_mb: int, part_bytes: int
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(store.obstore, "put", lambda *place, **options: asked.update(options))
    open_store("memory://bucket").put_stream("large", iter(()), size_mb << 20)
    assert (asked["chunk_size"], asked["use_multipart"]) == (part_bytes, True)
    assert -(-(size_mb << 20) // part_bytes) <= 10_000


def test_a_limit_spaces_out_what_is_sent() -> None:
    clock = Clock()
    limit = Bandwidth(10.0, lambda: clock.now_s, clock.sleep)
    begins = []
    for size_bytes in (5, 20, 10):
        limit.take(size_bytes)
        begins.append(clock.now_s)
    assert begins == [0.0, 0.5, 2.5]
    clock.now_s = 100.0
    limit.take(1)
    assert clock.now_s == 100.0, "time unused is not saved up, and costs nothing"


def test_threads_share_a_limit() -> None:
    slept: list[float] = []
    limit = Bandwidth(10.0, lambda: 0.0, slept.append)
    threads = [threading.Thread(target=limit.take, args=(5,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(slept) == [0.5 * count for count in range(1, 8)]


def test_an_upload_keeps_to_its_limit() -> None:
    clock = Clock()
    data = content()
    upload(
        open_store("memory://bucket"),
        "slow",
        memoryview(data),
        SIZE,
        limit=Bandwidth(1e6, lambda: clock.now_s, clock.sleep),
    )
    last = SIZE % transfer.CHUNK_BYTES or transfer.CHUNK_BYTES
    assert clock.now_s == pytest.approx((SIZE - last) / 1e6)
