"""Documents out of one local file: .txt (a document per file), .jsonl (one per line), .parquet (one per row)."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flextrain.data.documents import Document, Record, Source, Tally, documents_of
from flextrain.errors import DataError

ROWS_PER_BATCH = 1024


def read_documents(path: Path, source: Source, tally: Tally) -> Iterator[Document]:
    """The documents in `path`, the local copy of `source`. Raises DataError, naming the source's place and a remedy."""
    try:
        yield from READERS[path.suffix.lower()](path, source, tally)
    except OSError as error:
        raise unreadable(source.place, error) from error


def unreadable(place: str, error: OSError) -> DataError:
    return DataError(
        f"{place} cannot be read: {error.strerror or error}",
        number=9,
        remedy="check that it exists and that you may read it, or take it out of data.sources",
    )


def _read_text(path: Path, source: Source, tally: Tally) -> Iterator[Document]:
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_text(source.place, f"byte {error.start} is not UTF-8") from error
    if "\0" in text:
        raise _not_text(source.place, f"character {text.index(chr(0))} is NUL, as in binary files and UTF-16")
    if text:
        yield Document(source.name, text, len(text.encode()), len(data))
    else:
        tally.empty_documents += 1


def _not_text(place: str, found: str) -> DataError:
    return DataError(
        f"{place} is not text: {found}",
        number=3,
        remedy="convert it to UTF-8 (iconv -t utf-8), or take it out of data.sources",
    )


def _read_jsonl(path: Path, source: Source, tally: Tally) -> Iterator[Document]:
    with path.open("rb") as lines:
        records = (
            _parse_line(number, line, source.text_key) for number, line in enumerate(lines, start=1) if line.strip()
        )
        yield from documents_of(records, source, tally)


def _parse_line(number: int, line: bytes, text_key: str) -> Record:
    def bad(problem: str) -> Record:
        return Record(number, "", problem, len(line))

    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return bad(f"byte {error.start} of the line is not UTF-8")
    except (ValueError, RecursionError) as error:
        return bad(f"not JSON: {error}")
    if not isinstance(value, dict):
        return bad(f"a JSON {type(value).__name__}, not an object")
    if text_key not in value:
        return bad(f"no key {text_key!r}; it has {', '.join(map(repr, list(value)[:8])) or 'none'}")
    if not isinstance(value[text_key], str):
        return bad(f"{text_key!r} is a {type(value[text_key]).__name__}, not a text")
    return Record(number, value[text_key], "", len(line))


def _read_parquet(path: Path, source: Source, tally: Tally) -> Iterator[Document]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            check_column(file.schema_arrow, source)
            share_bytes = source.size_bytes / max(1, file.metadata.num_rows)
            yield from documents_of(_rows(file, source.text_key, share_bytes), source, tally)
    except pa.ArrowException as error:
        raise DataError(
            f"{source.place} is no sound parquet file: {str(error).splitlines()[0]}",
            number=5,
            remedy="write the file again, or take it out of data.sources",
        ) from error


def check_column(schema: Any, source: Source) -> None:
    """Raise DataError unless the Arrow schema has the text column as a string."""
    import pyarrow as pa

    found = {field.name: str(field.type) for field in schema}
    if found.get(source.text_key) not in {str(pa.string()), str(pa.large_string()), str(pa.string_view())}:
        columns = ", ".join(f"{name} ({kind})" for name, kind in found.items())
        raise DataError(
            f"{source.place} has no string column {source.text_key!r}; its columns are {columns}",
            number=8,
            remedy="set data.text_key to the column that holds the text",
        )


def _rows(file: Any, text_key: str, share_bytes: float) -> Iterator[Record]:
    number = 0
    for batch in file.iter_batches(batch_size=ROWS_PER_BATCH, columns=[text_key]):
        for scalar in batch.column(0):
            number += 1
            yield row_record(number, scalar, text_key, share_bytes)


def row_record(number: int, scalar: Any, text_key: str, share_bytes: float) -> Record:
    """One Arrow string scalar as a record."""
    try:
        text = scalar.as_py()
    except UnicodeDecodeError:
        return Record(number, "", f"{text_key!r} is not UTF-8", share_bytes)
    return Record(number, text or "", "" if text is not None else f"{text_key!r} is null", share_bytes)


READERS: dict[str, Callable[[Path, Source, Tally], Iterator[Document]]] = {
    ".txt": _read_text,
    ".py": _read_text,  # only the standard library comes as .py
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
