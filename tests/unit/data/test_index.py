"""Reading an index: windows over shard borders, and no tampered byte unnoticed."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.s3 import Bucket
from tests.support.texts import small_config

from flextrain.data import TokenIndexFile
from flextrain.data.index_builder import build_index
from flextrain.data.shards import TokenArray
from flextrain.errors import DataError, IndexCorrupt, StorageError


@pytest.fixture
def copy(index_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(index_folder, tmp_path / "index.bin"))


@st.composite
def token_arrays(draw: st.DrawFn) -> tuple[np.ndarray, TokenArray]:
    total, size = draw(st.integers(1, 60)), draw(st.integers(1, 60))
    whole = np.arange(100, 100 + total, dtype=draw(st.sampled_from([np.uint16, np.uint32])))
    return whole, TokenArray([whole[start : start + size] for start in range(0, total, size)])


@given(arrays=token_arrays(), data=st.data())
@settings(deadline=None)
def test_shards_read_as_one_array(arrays: tuple[np.ndarray, TokenArray], data: st.DataObject) -> None:
    whole, array = arrays
    start = data.draw(st.integers(0, len(whole)))
    length = data.draw(st.integers(0, len(whole) - start))
    assert np.array_equal(array.window(start, length), whole[start : start + length])
    if length:
        starts = data.draw(st.lists(st.integers(0, len(whole) - length), max_size=9))
        found = array.gather(starts, length)
        assert (found.dtype, found.shape) == (np.int64, (len(starts), length))
        assert np.array_equal(found, [whole[at : at + length] for at in starts] if starts else found)
    cut = slice(
        *(data.draw(st.none() | st.integers(-70, 70)) for _ in range(2)), data.draw(st.sampled_from([None, 1, 3, -1]))
    )
    assert np.array_equal(array[cut], whole[cut])
    assert array[-1] == whole[-1]
    assert (len(array), list(array)) == (len(whole), whole.tolist())


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (0, 11), (8, 3), (11, 0), (3, -1)])
def test_windows_outside_are_index_errors(start: int, length: int) -> None:
    for array in (TokenArray([np.arange(10)]), TokenArray([np.arange(6), np.arange(4)])):
        with pytest.raises(IndexError):
            array.window(start, length)
        if length > 0:
            with pytest.raises(IndexError):
                array.gather([0, start], length)


def test_an_index_opens_as_written(index_folder: Path) -> None:
    train, heldout = (TokenIndexFile(index_folder, split=split) for split in ("train", "heldout"))
    assert (train.dtype, train.vocab_size) == (np.uint16, train.tokenizer().vocab_size)
    assert train.digest == heldout.digest != ""
    assert len(train) == train.num_tokens == len(train.tokens)
    end = train.tokenizer().end_of_text
    positions = np.flatnonzero(train.tokens[:] == end) + 1
    assert np.array_equal(positions, train.document_ends)
    text = train.tokenizer().decode(train.window(0, int(train.document_ends[0]) - 1))
    assert text.startswith("if ")
    train.verify()


def test_tokens_are_read_where_they_lie(index_folder: Path) -> None:
    index = TokenIndexFile(index_folder)
    window = index.window(5, 100)
    assert np.shares_memory(window, index.tokens.shards[0])
    assert not window.flags.writeable  # a read-only map, not a copy in memory


def test_another_process_can_be_handed_an_index(index_folder: Path) -> None:
    index = TokenIndexFile(index_folder, split="heldout")
    data = pickle.dumps(index)
    assert len(data) < 1_000
    again = pickle.loads(data)
    assert (again.split, again.digest) == ("heldout", index.digest)
    assert np.array_equal(again.tokens[:], index.tokens[:])


def test_equal_content_has_the_same_digest_and_the_tokenizer_counts(corpus_folder: Path, tmp_path: Path) -> None:
    digests = [
        build_index(small_config(corpus_folder, tokenizer=f"train:{size}"), str(tmp_path / str(size)), progress=False)[
            1
        ]
        for size in (300, 301)
    ]
    assert digests[0] != digests[1]


def test_a_changed_byte_is_found_by_verify(copy: Path) -> None:
    for name in ("train-00000.bin", "heldout-00000.ends"):
        data = bytearray((copy / name).read_bytes())
        data[len(data) // 2] ^= 1
        (copy / name).write_bytes(data)
        with pytest.raises(IndexCorrupt, match=rf"{name} was changed"):
            TokenIndexFile(copy).verify()
        data[len(data) // 2] ^= 1
        (copy / name).write_bytes(data)
    TokenIndexFile(copy).verify()


@pytest.mark.parametrize("name", ["train-00000.bin", "train-00000.ends"])
@pytest.mark.parametrize("size_bytes", [None, 0, 10, 10**6])
def test_a_shard_of_another_size_is_found_when_opening(copy: Path, name: str, size_bytes: int | None) -> None:
    if size_bytes is None:
        (copy / name).unlink()
    else:
        (copy / name).write_bytes(b"\0" * size_bytes)
    with pytest.raises(IndexCorrupt, match=rf"{copy}/{name} .*manifest records") as caught:
        TokenIndexFile(copy)
    assert "build it again" in caught.value.remedy


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", '{"version": 1}', '{"digest": "x", "version": 1}', "\xff\0"]
)
def test_a_broken_manifest_is_named(copy: Path, text: str) -> None:
    (copy / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(IndexCorrupt, match=rf"{copy}/manifest.json is broken"):
        TokenIndexFile(copy)


def test_a_manifest_edited_by_hand_is_refused(copy: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["vocab_size"] += 1
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(IndexCorrupt, match="not have the digest"):
        TokenIndexFile(copy)


def test_a_manifest_of_another_version_says_so(copy: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**manifest, "version": 2}))
    with pytest.raises(DataError, match="format version 2, this flextrain reads version 1"):
        TokenIndexFile(copy)


def test_places_without_an_index_are_named(tmp_path: Path, index_folder: Path) -> None:
    (tmp_path / "file.bin").write_bytes(b"x")
    with pytest.raises(StorageError, match=r"file\.bin is a file; a folder is needed"):
        TokenIndexFile(tmp_path / "file.bin")
    with pytest.raises(DataError, match=r"nowhere holds no finished index: there is no manifest\.json"):
        TokenIndexFile(tmp_path / "nowhere")
    with pytest.raises(DataError, match="has no split 'test'") as caught:
        TokenIndexFile(index_folder, split="test")
    assert "heldout, train" in caught.value.remedy


@pytest.mark.integration
class TestInABucket:
    """moto stands for S3; what is read and written goes through the network stack."""

    @pytest.fixture(autouse=True)
    def environment(self, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in bucket.environ.items():
            monkeypatch.setenv(name, value)

    def test_text_and_index_live_there(
        self, bucket: Bucket, corpus_folder: Path, index_folder: Path, tmp_path: Path
    ) -> None:
        for path in corpus_folder.iterdir():
            bucket.client().upload_file(str(path), bucket.name, f"text/{path.name}")
        config = small_config(f"{bucket.url}/text", shard_tokens=1024)
        uri, digest = build_index(config, f"{bucket.url}/index", progress=False)
        assert (uri, digest) == build_index(config, f"{bucket.url}/index", progress=False)
        remote = TokenIndexFile(uri, cache_dir=tmp_path / "cache")
        assert np.array_equal(remote.tokens[:], TokenIndexFile(index_folder).tokens[:])
        remote.verify()
        assert not [path for path in (tmp_path / "cache").rglob("*") if path.name.startswith(".")]

        key = "index/train-00001.bin"
        bucket.client().put_object(Bucket=bucket.name, Key=key, Body=b"\1" * 2048)
        TokenIndexFile(uri, cache_dir=tmp_path / "cache")  # the copy here is whole, as checked when it was fetched
        with pytest.raises(IndexCorrupt, match=rf"{bucket.url}/{key} was changed"):
            TokenIndexFile(uri, cache_dir=tmp_path / "fresh")
        assert not (tmp_path / "fresh" / digest[:16] / "train-00001.bin").exists()

    def test_objects_and_prefixes_are_sources(self, bucket: Bucket) -> None:
        from flextrain.data.sources import resolve_sources

        for key in ("a.txt", "sub/b.txt", "sub/c.jsonl", "sub/image.png", "subway/d.txt"):
            bucket.client().put_object(Bucket=bucket.name, Key=key, Body=b"text")

        def names(*urls: str) -> list[str]:
            return [source.name for source in resolve_sources(urls, "text")]

        assert names(bucket.url) == ["a.txt", "sub/b.txt", "sub/c.jsonl", "subway/d.txt"]
        assert names(f"{bucket.url}/sub/") == ["b.txt", "c.jsonl"]
        assert names(f"{bucket.url}/sub/b.txt", f"{bucket.url}/a.txt") == ["b.txt", "a.txt"]
