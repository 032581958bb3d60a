"""The store: whole objects or nothing, one winner per key, errors that say where and what to do.

Tests of behaviour run over stores of every kind; tests.support.stores says what stands in for whom.
"""

import threading
from pathlib import Path

import pytest
from tests.support.stores import azurite, bucket, google, place, s3_endpoint, store

from flextrain.errors import AlreadyExists, StorageError
from flextrain.storage import Store, open_store

__all__ = ["azurite", "bucket", "google", "place", "s3_endpoint", "store"]


def test_objects_come_back_whole_and_in_ranges(store: Store) -> None:
    store.put("a/b.bin", b"0123456789")
    assert store.get("a/b.bin") == b"0123456789"
    assert bytes(store.get_range("a/b.bin", 3, 4)) == b"3456"
    assert store.size("a/b.bin") == 10
    assert store.size("a/c.bin") is None


def test_a_range_past_the_end_is_an_error(store: Store) -> None:
    store.put("x", b"0123")
    with pytest.raises(StorageError):
        store.get_range("x", 2, 9)


def test_exactly_one_of_many_creators_wins(store: Store) -> None:
    won: list[int] = []

    def create(who: int) -> None:
        try:
            store.put("manifest.json", b"%d" % who, create=True)
            won.append(who)
        except AlreadyExists:
            pass

    threads = [threading.Thread(target=create, args=(who,)) for who in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.get("manifest.json") == b"%d" % won[0]


def test_a_child_sees_only_what_is_below_it(store: Store) -> None:
    store.put("run/one/x", b"1")
    store.put("run/one-more/y", b"22")
    child = store.child("run/one")
    assert [(e.key, e.size_bytes) for e in child.list()] == [("x", 1)]
    assert child.child("deep").list() == []
    child.delete(["x", "never-there"])
    assert [e.key for e in store.list()] == ["run/one-more/y"]


def test_deleting_takes_those_that_are_there_and_no_others(store: Store) -> None:
    for key in ("a/x", "a/y", "a/z", "b"):
        store.put(key, b"1")
    store.delete(["a/x", "a/never-there", "a/z"])
    assert [entry.key for entry in store.list()] == ["a/y", "b"]
    store.delete([])
    store.delete(["a/y", "b"])
    store.delete(["a/y", "b"])
    assert store.list() == []


def test_a_stream_arrives_whole_in_however_many_parts(store: Store) -> None:
    data = bytes(range(256)) * (36 << 12)  # 36 MiB: two parts
    pieces = [memoryview(data)[at : at + 5_000_000] for at in range(0, len(data), 5_000_000)]
    store.put_stream("known", iter(pieces), len(data))
    store.put_stream("unknown", iter(pieces))
    store.put_stream("small", iter([b"ab", b"cd"]), 4)
    store.put_stream("empty", iter(()), 0)
    assert store.get("known") == store.get("unknown") == data
    assert (store.get("small"), store.get("empty")) == (b"abcd", b"")


def test_a_range_streams_as_it_is(store: Store) -> None:
    data = bytes(range(256)) * (8 << 10)
    store.put("x", data)
    assert b"".join(store.stream_range("x", 1000, 1_500_000)) == data[1000:1_501_000]
    with pytest.raises(StorageError):
        list(store.stream_range("x", len(data) - 10, 20))
    with pytest.raises(StorageError) as caught:
        list(store.stream_range("y", 0, 20))
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_a_stream_that_fails_leaves_nothing(store: Store) -> None:
    def chunks():  # type: ignore[no-untyped-def]
        yield b"x" * 100
        raise RuntimeError("the source broke")

    with pytest.raises(Exception, match="source broke"):
        store.put_stream("torn", chunks())
    assert store.size("torn") is None


def test_reading_a_folder_that_is_not_there_creates_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path / "absent")
    assert store.list() == []
    assert store.size("x") is None
    with pytest.raises(StorageError, match=r"absent/x does not exist\n  → check the path"):
        store.get("x")
    assert not (tmp_path / "absent").exists()


def test_a_download_arrives_whole_or_not_at_all(tmp_path: Path) -> None:
    store = open_store(tmp_path / "root")
    store.put("big", bytes(40 << 20))
    store.download("big", tmp_path / "copy" / "big")
    assert (tmp_path / "copy" / "big").stat().st_size == 40 << 20
    with pytest.raises(StorageError):
        store.download("missing", tmp_path / "copy" / "missing")
    assert [p.name for p in (tmp_path / "copy").iterdir()] == ["big"]


@pytest.mark.parametrize("key", ["../outside", "a/../../outside"])
def test_keys_cannot_leave_the_store(tmp_path: Path, key: str) -> None:
    store = open_store(tmp_path / "root")
    with pytest.raises(StorageError):
        store.put(key, b"x")
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize(("url", "said"), [("ftp://host/x", "unknown scheme 'ftp'"), ("s3:///x", "names no bucket")])
def test_a_url_that_cannot_be_is_refused_with_the_remedy(url: str, said: str) -> None:
    with pytest.raises(StorageError, match=said) as caught:
        open_store(url)
    assert caught.value.remedy


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        open_store(tmp_path / "file").put("x", b"")


def test_a_bucket_without_credentials_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StorageError, match=r"s3://bucket/x: .*credentials") as caught:
        open_store("s3://bucket/x")
    assert "AWS_ACCESS_KEY_ID" in caught.value.remedy


def test_an_account_that_nobody_named_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_USE_EMULATOR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(StorageError, match="az://container/x") as caught:
        open_store("az://container/x")
    assert "AZURE_STORAGE_ACCOUNT_NAME" in caught.value.remedy


def test_stat_tells_size_and_age(store: Store) -> None:
    store.put("a/x", b"123")
    entry = store.stat("a/x")
    assert entry == store.list()[0]
    assert store.stat("a/y") is None
