"""Which documents are held out, and that neither split is ever empty."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flextrain.data.corpus import Corpus
from flextrain.data.documents import Document, Tally
from flextrain.errors import DataError


@dataclass(frozen=True)
class Listed:
    """A source of given texts."""

    texts: tuple[str, ...]
    name: str = "listed"
    text_key: str = "text"

    @property
    def place(self) -> str:
        return self.name

    @property
    def size_bytes(self) -> int:
        return sum(len(text.encode()) for text in self.texts)

    def identity(self) -> str:
        return str(hash(self.texts))

    def documents(self, tally: Tally) -> Iterator[Document]:
        for number, text in enumerate(self.texts):
            size_bytes = len(text.encode())
            yield Document(f"{self.name}/{number}", text, size_bytes, size_bytes)


def splits(texts: tuple[str, ...], fraction: float = 0.03) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"train": [], "heldout": []}
    for split, document in Corpus([Listed(texts)], fraction).documents():
        found[split].append(document.text)
    return found


@given(st.integers(2, 60), st.sampled_from([1e-9, 0.03, 0.5, 0.999999]))
@settings(deadline=None)
def test_every_document_is_in_one_split_and_no_split_is_empty(count: int, fraction: float) -> None:
    texts = tuple(f"text {i}" for i in range(count))
    found = splits(texts, fraction)
    assert found["train"]
    assert found["heldout"]
    assert sorted(found["train"] + found["heldout"]) == sorted(texts)


def test_about_the_asked_share_of_documents_is_held_out() -> None:
    found = splits(tuple(f"text {i}" for i in range(20_000)), 0.03)
    assert 500 < len(found["heldout"]) < 700


def test_more_documents_move_none_between_splits() -> None:
    few, many = (splits(tuple(f"text {i}" for i in range(count)), 0.2) for count in (100, 200))
    assert set(few["train"]) <= set(many["train"])
    assert set(few["heldout"]) <= set(many["heldout"])


@given(st.text(min_size=2, max_size=400), st.floats(0.01, 0.9))
@settings(deadline=None)
def test_a_lone_document_gives_its_end_to_the_heldout_split(text: str, fraction: float) -> None:
    text = text.encode("utf-8", "ignore").decode() or "ab"
    if len(text) < 2:
        return
    found = splits((text,), fraction)
    assert "".join(found["train"] + found["heldout"]) == text
    assert found["train"] != [""] != found["heldout"]


def test_a_lone_document_is_cut_where_a_line_begins() -> None:
    lines = "".join(f"line {i:04d}\n" for i in range(1_000))
    found = splits((lines,), 0.1)
    assert found["heldout"][0].startswith("line 0")
    assert 90 <= found["heldout"][0].count("\n") <= 110


def test_bytes_of_a_cut_document_add_up() -> None:
    text = "é\n" * 50
    parts = [document for _, document in Corpus([Listed((text,))], 0.25).documents()]
    assert sum(part.text_bytes for part in parts) == len(text.encode())
    assert sum(part.source_bytes for part in parts) == pytest.approx(len(text.encode()))
    assert all(part.text_bytes == len(part.text.encode()) for part in parts)


@pytest.mark.parametrize("texts", [(), ("x",)])
def test_no_text_is_an_error_that_names_the_sources(texts: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match=r"holds no text: 1 sources \(listed\)"):
        splits(texts)


def test_a_sample_is_spread_over_the_corpus_and_about_as_large_as_asked() -> None:
    texts = tuple(f"{i:04d}" + "x" * (i % 97) for i in range(4_000))
    corpus = Corpus([Listed(texts)], 0.03)
    sample = [document.text for document in corpus.training_sample(corpus.size_bytes // 10)]
    assert sum(map(len, sample)) == pytest.approx(corpus.size_bytes / 10, rel=0.05)
    thirds = [sum(text < border for text in sample) for border in ("1333", "2666", "9999")]
    assert thirds[0] == pytest.approx(thirds[2] / 3, rel=0.1)
    assert thirds[1] == pytest.approx(2 * thirds[2] / 3, rel=0.1)
    assert not set(sample) & set(splits(texts)["heldout"])


def test_a_small_corpus_is_sampled_whole() -> None:
    texts = tuple(f"text {i}" for i in range(100))
    corpus = Corpus([Listed(texts)], 0.1)
    assert [document.text for document in corpus.training_sample(10**9)] == splits(texts, 0.1)["train"]
