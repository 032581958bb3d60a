"""Broken inputs: every one names its place and a remedy, and leaves nothing half-written."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.s3 import Bucket
from tests.support.texts import small_config, write_corpus

from flextrain.data.index_builder import build_index, main
from flextrain.errors import FlextrainError

GARBAGE = bytes(range(256)) * 40


def parquet(path: Path, **columns: list[object]) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def truncated(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


def overwritten(path: Path) -> Path:
    """Pages destroyed behind a sound footer."""
    data = bytearray(path.read_bytes())
    data[4:200] = b"\xff" * 196
    path.write_bytes(data)
    return path


def written(path: Path, data: bytes) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


def lines(path: Path, *records: object) -> Path:
    return written(path, "".join(json.dumps(record) + "\n" for record in records).encode())


def dangling(path: Path) -> Path:
    path.symlink_to(path.parent / "gone")
    return path


Case = tuple[Callable[[Path], object], str]  # makes the source below a folder; what the message must hold besides it
SOURCES: dict[str, Case] = {
    "missing file": (lambda f: f / "none.txt", "does not exist"),
    "missing folder": (lambda f: f"{f / 'none'}/", "does not exist"),
    "glob without match": (lambda f: f / "*.jsonl", "nothing matches"),
    "dangling link": (lambda f: dangling(f / "a.txt"), "does not exist"),
    "empty folder": (lambda f: f, "holds no file of a known kind"),
    "folder of other files": (lambda f: written(f / "sub" / "a.pdf", b"x").parent, "holds no file of a known kind"),
    "unknown kind": (lambda f: written(f / "a.csv", b"x"), "of no kind that can be read"),
    "glob of unknown kinds": (lambda f: written(f / "a.csv", b"x").parent / "*", "of no kind that can be read"),
    "binary text file": (lambda f: written(f / "a.txt", GARBAGE), "is not text: byte 128 is not UTF-8"),
    "one byte that is not UTF-8": (lambda f: written(f / "a.txt", b"caf\xe9"), "is not text: byte 3"),
    "UTF-16": (lambda f: written(f / "a.txt", "text".encode("utf-16-le")), "is NUL"),
    "zero bytes": (lambda f: written(f / "a.txt", b""), "holds no text"),
    "one character": (lambda f: written(f / "a.txt", b"x"), "holds no text"),
    "only empty records": (lambda f: lines(f / "a.jsonl", {"text": ""}, {"text": ""}), "2 empty texts"),
    "zero bytes of jsonl": (lambda f: written(f / "a.jsonl", b"\n\n"), "holds no text"),
    "binary jsonl": (lambda f: written(f / "a.jsonl", GARBAGE), "a.jsonl:1: "),
    "text called jsonl": (lambda f: written(f / "a.jsonl", b"plain\ntext\n"), "a.jsonl:1: not JSON"),
    "a JSON array": (lambda f: lines(f / "a.jsonl", [{"text": "x"}]), "a.jsonl:1: a JSON list"),
    "text key missing": (lambda f: lines(f / "a.jsonl", {"body": "x"}), "a.jsonl:1: no key 'text'; it has 'body'"),
    "text key of numbers": (lambda f: lines(f / "a.jsonl", {"text": 1}), "a.jsonl:1: 'text' is a int"),
    "deep nesting": (lambda f: written(f / "a.jsonl", b"[" * 10**6), "a.jsonl:1: not JSON"),
    "parquet of garbage": (lambda f: written(f / "a.parquet", GARBAGE), "is no sound parquet file"),
    "parquet of zero bytes": (lambda f: written(f / "a.parquet", b""), "is no sound parquet file"),
    "parquet cut short": (lambda f: truncated(parquet(f / "a.parquet", text=["x"])), "is no sound parquet file"),
    "parquet with broken pages": (lambda f: overwritten(parquet(f / "a.parquet", text=["x" * 99])), "a.parquet"),
    "parquet without the column": (lambda f: parquet(f / "a.parquet", body=["x"]), "columns are body (string)"),
    "parquet of numbers": (lambda f: parquet(f / "a.parquet", text=[1]), "columns are text (int64)"),
    "parquet of nulls": (
        lambda f: parquet(f / "a.parquet", text=pa.array([None], pa.string())),
        "a.parquet:1: 'text' is null",
    ),
    "parquet without rows": (lambda f: parquet(f / "a.parquet", text=pa.array([], pa.string())), "holds no text"),
    "unknown scheme": (lambda f: "ftp://host", "unknown scheme 'ftp'"),
    "no bucket": (lambda f: "s3:///", "names no bucket"),
    "hub out of reach": (lambda f: "hf:wikitext", "cannot be loaded"),
    "hub folder without data": (lambda f: f"hf:{f}", "cannot be loaded"),
}


@pytest.mark.parametrize(("make", "message"), SOURCES.values(), ids=SOURCES)
def test_broken_sources(
    make: Callable[[Path], object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flextrain.hub.hub_reachable", lambda endpoint: False)
    folder, out = tmp_path / "corpus", tmp_path / "out"
    folder.mkdir()
    source = str(make(folder))
    with pytest.raises(FlextrainError) as caught:
        build_index(small_config(source), str(out), progress=False)
    assert message in str(caught.value)
    assert source.rstrip("/*") in str(caught.value)
    assert caught.value.remedy
    assert not out.exists()


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ("train:12", "no possible vocabulary"),
        ("./no-such-folder", "cannot be loaded"),
        ("EMPTY", "cannot be loaded"),
        ("no-such-name", "cannot be loaded"),
        ("not a name!", "cannot be loaded"),
    ],
)
def test_broken_tokenizers(tokenizer: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flextrain.hub.hub_reachable", lambda endpoint: False)
    write_corpus(tmp_path / "corpus")
    (tmp_path / "EMPTY").mkdir()
    spec = tokenizer.replace("EMPTY", str(tmp_path / "EMPTY"))
    with pytest.raises(FlextrainError, match=message) as caught:
        build_index(small_config(tmp_path / "corpus", tokenizer=spec), str(tmp_path / "out"), progress=False)
    assert repr(spec) in str(caught.value)
    assert caught.value.remedy
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
def test_files_that_may_not_be_read(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / f"a{suffix}", b"{}")

    def denied(self: Path, *_: object, **__: object) -> object:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "open", denied)  # file modes do not bind root, which tests may run as
    with pytest.raises(FlextrainError, match=f"{path} cannot be read: Permission denied") as caught:
        build_index(small_config(path), str(tmp_path / "out"), progress=False)
    assert "you may read it" in caught.value.remedy
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_a_file_stays_as_it_is(corpus_folder: Path, tmp_path: Path) -> None:
    out = written(tmp_path / "index.bin", b"precious")
    with pytest.raises(FlextrainError, match=f"{out} is a file; a folder is needed"):
        build_index(small_config(corpus_folder), str(out), progress=False)
    assert out.read_bytes() == b"precious"


def test_an_output_below_a_file_is_an_error(corpus_folder: Path, tmp_path: Path) -> None:
    file = written(tmp_path / "file", b"x")
    with pytest.raises(FlextrainError, match=str(file)) as caught:
        build_index(small_config(corpus_folder), str(file / "index"), progress=False)
    assert caught.value.remedy


@pytest.mark.parametrize("source", ["stdlib-typo", "*.txt"])
def test_the_command_prints_no_traceback(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([source, "-o", "out"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("[FT-DAT-001]")
    assert "→" in error
    assert "Traceback" not in error
    assert not list(tmp_path.iterdir())


@pytest.mark.integration
@pytest.mark.parametrize("place", ["source", "empty prefix", "missing object", "output"])
def test_buckets_and_objects_that_are_not_there(
    place: str, bucket: Bucket, corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bucket.environ.items():
        monkeypatch.setenv(name, value)
    out = str(tmp_path / "out")
    source, out, named = {
        "source": ("s3://no-such-bucket/text", out, "s3://no-such-bucket"),
        "empty prefix": (f"{bucket.url}/text", out, f"{bucket.url}/text"),
        "missing object": (f"{bucket.url}/a.jsonl", out, f"{bucket.url}/a.jsonl"),
        "output": (str(corpus_folder), "s3://no-such-bucket/index", "s3://no-such-bucket"),
    }[place]
    with pytest.raises(FlextrainError, match=named) as caught:
        build_index(small_config(source), out, progress=False)
    assert caught.value.code.startswith("FT-STO")
    assert "bucket" in caught.value.remedy
    assert not (tmp_path / "out").exists()
    assert bucket.keys() == []
