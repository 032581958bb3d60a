"""The corpus: documents of all sources in a fixed order, each in the training or the held-out split."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from flextrain.data.documents import Document, Source, Tally
from flextrain.data.sources import resolve_sources
from flextrain.errors import DataError

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")


@dataclass(frozen=True)
class _Override:
    """The document that goes to `split` whatever its hash says, so that no split is empty; cut where it is alone."""

    ordinal: int = -1
    split: Split = "train"
    cut: bool = False


class Corpus:
    """Documents by split. The hash of a document's name decides, so adding files moves no other file."""

    def __init__(self, sources: Sequence[Source], heldout_fraction: float) -> None:
        self.sources, self.heldout_fraction = list(sources), heldout_fraction

    @classmethod
    def of(cls, specs: Sequence[str], *, text_key: str, heldout_fraction: float) -> "Corpus":
        """The corpus that `data.sources` name. Raises DataError or StorageError where something is not there."""
        return cls(resolve_sources(specs, text_key), heldout_fraction)

    @property
    def size_bytes(self) -> int:
        return sum(source.size_bytes for source in self.sources)

    def describe(self) -> list[dict[str, Any]]:
        """Name, size and content identity of every source: what an index's recipe records of its corpus."""
        return [
            {"name": source.name, "size_bytes": source.size_bytes, "identity": source.identity()}
            for source in self.sources
        ]

    def documents(self, tally: Tally | None = None) -> Iterator[tuple[Split, Document]]:
        """Every document that is not empty, with its split; both splits get at least one.

        `tally` counts what was skipped. Raises DataError (a source is unsound, or the corpus holds no text).
        """
        override = self._override
        for ordinal, document in enumerate(self._all(tally or Tally())):
            if override.cut:
                yield from self._cut(document)
            elif ordinal == override.ordinal:
                yield override.split, document
            else:
                yield self._split_of(document), document

    def training_sample(self, limit_bytes: int) -> Iterator[Document]:
        """Documents of the training split, spread evenly over the corpus, of about `limit_bytes` in all."""
        keep = min(1.0, limit_bytes / max(1, self.size_bytes))
        seen = kept = 0
        for split, document in self.documents():
            if split == "train":
                if kept <= keep * seen:
                    kept += document.text_bytes
                    yield document
                seen += document.text_bytes

    def _all(self, tally: Tally) -> Iterator[Document]:
        for source in self.sources:
            yield from source.documents(tally)

    def _split_of(self, document: Document) -> Split:
        return "heldout" if _hash(document.name) < self.heldout_fraction else "train"

    @cached_property
    def _override(self) -> _Override:
        """Read on until both splits have a document, which in all but the smallest corpora is soon."""
        hashes: list[float] = []
        seen: set[Split] = set()
        tally = Tally()
        for document in self._all(tally):
            seen.add(self._split_of(document))
            if len(seen) == 2:
                return _Override()
            hashes.append(_hash(document.name))
        if not hashes:
            raise self._empty(tally)
        if len(hashes) == 1:
            return _Override(cut=True)
        if "train" in seen:
            return _Override(hashes.index(min(hashes)), "heldout")
        return _Override(hashes.index(max(hashes)), "train")

    def _cut(self, document: Document) -> Iterator[tuple[Split, Document]]:
        """A document that is alone gives its last lines, or characters, to the held-out split."""
        text = document.text
        if len(text) < 2:
            raise self._empty(Tally())
        at = min(max(1, round(len(text) * (1 - self.heldout_fraction))), len(text) - 1)
        at = text.rfind("\n", max(0, 2 * at - len(text)), at) + 1 or at  # a line border, if one is near
        train_bytes = len(text[:at].encode())
        source_bytes = document.source_bytes * train_bytes / document.text_bytes
        yield "train", replace(document, text=text[:at], text_bytes=train_bytes, source_bytes=source_bytes)
        rest_bytes = document.text_bytes - train_bytes
        rest_source_bytes = document.source_bytes - source_bytes
        yield "heldout", replace(document, text=text[at:], text_bytes=rest_bytes, source_bytes=rest_source_bytes)

    def _empty(self, tally: Tally) -> DataError:
        places = ", ".join(source.place for source in self.sources[:3]) + (", …" if len(self.sources) > 3 else "")
        return DataError(
            f"the corpus holds no text: {len(self.sources)} sources ({places}), {tally.empty_documents} empty texts",
            number=6,
            remedy="name sources with text in data.sources",
        )


def _hash(name: str) -> float:
    """Uniform in [0, 1), the same everywhere."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()) / 2**64
