"""What `data.sources` may name, and which documents come out of it."""

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flextrain.data.documents import Document, Record, Tally, documents_of
from flextrain.data.sources import FileSource, resolve_sources
from flextrain.errors import DataError


def read(*specs: object, text_key: str = "text", tally: Tally | None = None) -> list[Document]:
    sources = resolve_sources([str(spec) for spec in specs], text_key)
    return [document for source in sources for document in source.documents(tally or Tally())]


def write_jsonl(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_the_standard_library_is_real_text_without_tests() -> None:
    documents = read("stdlib")
    names = {document.name for document in documents}
    assert {"json/decoder.py", "argparse.py", "asyncio/base_events.py"} <= names
    assert not any("test" in part.split("/")[:-1] for part in names)
    assert not any("site-packages" in name or "tests/" in name for name in names)
    assert len(documents) > 500
    assert sum(document.text_bytes for document in documents) > 5_000_000
    assert [d.name for d in documents] == [d.name for d in read("stdlib")]


def test_a_text_file_is_one_document_unchanged(tmp_path: Path) -> None:
    text = "first\r\nsecond é 𝄞\n\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    [document] = read(tmp_path / "a.txt")
    assert document == Document("a.txt", text, len(text.encode()), len(text.encode()))


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    [document] = read(tmp_path / "a.txt")
    assert (document.text, document.text_bytes) == ("hello", 5)


def test_jsonl_gives_a_document_per_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "one"}\n\n{"body": "two\\nlines", "id": 3}\n')
    documents = read(path, text_key="body")
    assert [(d.name, d.text) for d in documents] == [("a.jsonl:1", "one"), ("a.jsonl:3", "two\nlines")]
    assert sum(d.source_bytes for d in documents) == path.stat().st_size - 1  # all but the blank line


def test_parquet_gives_a_document_per_row(tmp_path: Path) -> None:
    texts = [f"text {i}" for i in range(2_500)]
    pq.write_table(pa.table({"id": range(2_500), "text": texts}), tmp_path / "a.parquet", row_group_size=700)
    documents = read(tmp_path / "a.parquet")
    assert [d.text for d in documents] == texts
    assert documents[-1].name == "a.parquet:2500"
    assert sum(d.source_bytes for d in documents) == pytest.approx((tmp_path / "a.parquet").stat().st_size)


def test_folders_are_read_recursively_in_order_of_names(tmp_path: Path) -> None:
    for name in ("b.txt", "sub/a.txt", "sub/deep/c.TXT", "a.md", "z.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}')
    assert [d.name for d in read(tmp_path)] == ["b.txt", "sub/a.txt", "sub/deep/c.TXT", "z.jsonl:1"]


def test_globs_name_files_below_their_first_wildcard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("x/a.txt", "x/b.txt", "y/a.txt", "y/a.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    assert [d.name for d in read(tmp_path / "*" / "a.*")] == ["x/a.txt", "y/a.txt"]
    assert [d.name for d in read(tmp_path / "x" / "*.txt")] == ["a.txt", "b.txt"]
    assert [d.name for d in read(f"{tmp_path}/**/*.txt")] == ["x/a.txt", "x/b.txt", "y/a.txt"]
    monkeypatch.chdir(tmp_path)
    assert [d.name for d in read("x/*.txt")] == ["a.txt", "b.txt"]
    assert [d.name for d in read(f"file://{tmp_path}/x")] == ["a.txt", "b.txt"]


def test_a_file_named_twice_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    assert len(read(tmp_path, tmp_path / "a.txt", tmp_path / "*.txt")) == 1


def test_names_and_identities_do_not_depend_on_where_the_corpus_lies(tmp_path: Path) -> None:
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("the same")
        os.utime(tmp_path / folder / "a.txt", (len(folder), len(folder)))
    here, there = (
        [(s.name, s.identity()) for s in resolve_sources([str(tmp_path / f)], "text")] for f in os.listdir(tmp_path)
    )
    assert here == there
    (tmp_path / "here" / "a.txt").write_text("another.")
    assert [(s.name, s.identity()) for s in resolve_sources([str(tmp_path / "here")], "text")] != there


def test_bad_lines_are_counted_quoted_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [
        '{"text": "good"}',
        "not json",
        '["list"]',
        '{"other": 1}',
        '{"text": 5}',
        '{"text": "\\ud800"}',
        '{"text": ""}',
    ]
    path.write_bytes("\n".join(lines).encode() + b'\n{"text": "\xff"}\n{"text": "good"}\n')
    tally = Tally()
    assert [d.text for d in read(path, tally=tally)] == ["good", "good"]
    assert (tally.bad_records, tally.empty_documents) == (6, 1)
    quotes = [quote.removeprefix(f"{path}:") for quote in tally.examples]
    assert [quote.partition(":")[0] for quote in quotes] == ["2", "3", "4", "5", "6", "8"]
    for quote, reason in zip(
        quotes, ("JSON", "list", "no key 'text'; it has 'other'", "int", "surrogate", "UTF-8"), strict=True
    ):
        assert reason in quote


def test_too_many_bad_lines_are_an_error_at_the_first_of_them(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n' * 5 + "garbage\n" * 11)
    with pytest.raises(DataError, match=rf"{path}:6: not JSON.*\n.*11 bad records against 5 good") as caught:
        read(path)
    assert "data.text_key" in caught.value.remedy


def test_one_bad_line_in_a_hundred_is_tolerated_however_many(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(('{"text": "good"}\n' * 150 + "garbage\n") * 20)
    tally = Tally()
    assert len(read(path, tally=tally)) == 3_000
    assert tally.bad_records == 20


@given(st.lists(st.sampled_from(["good", "", None]), max_size=40))
@settings(deadline=None)
def test_nothing_is_lost_uncounted(texts: list[str | None]) -> None:
    source = FileSource("a.jsonl", Path("a.jsonl"), 0, "text")
    records = [Record(i, text or "", "" if text is not None else "null", 1.0) for i, text in enumerate(texts)]
    tally = Tally()
    try:
        documents = list(documents_of(records, source, tally))
    except DataError:
        assert texts.count(None) > 10 or "good" not in texts
    else:
        assert (len(documents), tally.bad_records, tally.empty_documents) == tuple(map(texts.count, ("good", None, "")))
