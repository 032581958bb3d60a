"""What a corpus is made of: documents, the sources they come from, and the account of what was skipped."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from flextrain.errors import DataError

BAD_RECORDS_ALLOWED = 10  # per source; above that, one in a hundred
EXAMPLES_KEPT = 20


@dataclass(frozen=True)
class Document:
    """One text. `name` is the same on every machine; `source_bytes` is its part of the source's size, for progress."""

    name: str
    text: str
    text_bytes: int
    source_bytes: float


@dataclass
class Tally:
    """What a pass over a corpus left out, so that nothing is left out silently."""

    empty_documents: int = 0
    bad_records: int = 0
    examples: list[str] = field(default_factory=list)

    def bad(self, quote: str) -> None:
        self.bad_records += 1
        if len(self.examples) < EXAMPLES_KEPT:
            self.examples.append(quote.encode("utf-8", "replace").decode())


class Source(Protocol):
    """A file, object or dataset that yields documents in a fixed order."""

    @property
    def name(self) -> str:
        """The same on every machine: the path below what the config named."""

    @property
    def place(self) -> str:
        """Where it is, for messages: a path, URL or dataset name."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def text_key(self) -> str: ...

    def identity(self) -> str:
        """Changes when the content does; part of an index's recipe."""

    def documents(self, tally: Tally) -> Iterator[Document]:
        """Its texts that are not empty. Raises DataError or StorageError, naming the place."""


@dataclass(frozen=True)
class Record:
    """A line or row before it is judged: a text, or the problem that it has instead."""

    number: int
    text: str
    problem: str
    source_bytes: float


def documents_of(records: Iterable[Record], source: Source, tally: Tally) -> Iterator[Document]:
    """The sound records as documents; bad ones are tallied and skipped.

    Raises DataError where more than BAD_RECORDS_ALLOWED and more than 1 % of a source's records are bad, or all are.
    """
    good = bad = 0
    quote = ""
    for record in records:
        encoded, problem = _encode(record)
        if problem:
            bad += 1
            quote = quote or f"{source.place}:{record.number}: {problem}"
            tally.bad(f"{source.place}:{record.number}: {problem}")
            if bad > max(BAD_RECORDS_ALLOWED, good // 100):
                raise _too_many_bad(quote, bad, good, source)
        elif not encoded:
            tally.empty_documents += 1
        else:
            good += 1
            yield Document(f"{source.name}:{record.number}", record.text, len(encoded), record.source_bytes)
    if bad and not good:
        raise _too_many_bad(quote, bad, good, source)


def _encode(record: Record) -> tuple[bytes, str]:
    if record.problem:
        return b"", record.problem
    try:
        return record.text.encode(), ""
    except UnicodeEncodeError:
        return b"", "the text holds half of a surrogate pair, which is no character"


def _too_many_bad(quote: str, bad: int, good: int, source: Source) -> DataError:
    return DataError(
        f"{quote}\n  this is the first of {bad} bad records against {good} good ones; expected JSON objects or rows "
        f"with a text under {source.text_key!r}",
        number=4,
        remedy="set data.text_key to the key that holds the text, or mend or remove the file",
    )
