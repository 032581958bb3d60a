"""Documents to token ids, in batches that keep all cores busy and memory bounded."""

from collections.abc import Iterable, Iterator

import numpy as np

from flextrain.data.corpus import Split
from flextrain.data.documents import Document
from flextrain.data.tokenizer import TokenIds, Tokenizer

BATCH_CHARS = 4_000_000  # text encoded at once
PIECE_CHARS = 1_000_000  # longer documents are encoded in pieces

_Item = tuple[Split, Document]


def encode_documents(documents: Iterable[_Item], tokenizer: Tokenizer) -> Iterator[tuple[Split, Document, TokenIds]]:
    """Every document, in order, with its ids, closed by the end of text."""
    end = np.array([tokenizer.end_of_text], dtype=np.uint32)
    for batch in _batches(documents):
        pieces = [list(pieces_of(document.text)) for _, document in batch]
        ids = iter(tokenizer.encode_batch([piece for group in pieces for piece in group]))
        for (split, document), group in zip(batch, pieces, strict=True):
            yield split, document, np.concatenate([*(next(ids) for _ in group), end])


def _batches(items: Iterable[_Item]) -> Iterator[list[_Item]]:
    batch: list[_Item] = []
    chars = 0
    for item in items:
        batch.append(item)
        chars += len(item[1].text)
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def pieces_of(text: str, limit: int = PIECE_CHARS) -> Iterator[str]:
    """`text` in pieces of about `limit` characters, each but the first starting with a line break after a letter.

    No pre-tokenizer of the GPT family joins a letter to a line break, so the ids are those of the whole text.
    """
    start = 0
    while len(text) - start > limit:
        end = _letter_before_break(text, start + limit)
        if end == len(text):
            break
        yield text[start:end]
        start = end
    yield text[start:]


def _letter_before_break(text: str, start: int) -> int:
    """Position of the first line break (LF or CRLF) from `start` on that follows a letter, or the text's length."""
    at = text.find("\n", start)
    while at >= 0:
        border = at - 1 if text[at - 1] == "\r" else at
        if border >= start and text[border - 1].isalpha():
            return border
        at = text.find("\n", at + 1)
    return len(text)
