"""What a model must beat: guessing each token by how often it occurs, and guessing blindly."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flextrain.data import TokenIndexFile

COUNTED_TOKENS = 100_000_000  # about, of a larger training split: frequencies need no more
PIECE_TOKENS = 1 << 20


@dataclass(frozen=True)
class Baselines:
    """Losses in nats per token, accuracy as a share."""

    unigram_loss: float
    unigram_accuracy: float
    uniform_loss: float


def baselines(train: TokenIndexFile, heldout: TokenIndexFile, tokens: int) -> Baselines:
    """Over the same held-out tokens that `evaluate.loss.heldout` scores: [1, 1 + tokens).

    Unigram probabilities are training frequencies with one added to each count; its guess is the most frequent token.
    """
    vocab_size = heldout.vocab_size
    train_counts = token_counts(train, vocab_size)
    seen = _counts((heldout.window(start, length) for start, length in _pieces(1, tokens)), vocab_size)
    log_p = np.log((train_counts + 1) / (train_counts.sum() + vocab_size))
    return Baselines(
        unigram_loss=float(-(seen * log_p).sum() / tokens),
        unigram_accuracy=float(seen[train_counts.argmax()] / tokens),
        uniform_loss=math.log(vocab_size),
    )


def token_counts(index: TokenIndexFile, vocab_size: int) -> npt.NDArray[np.int64]:
    """How often each id occurs; in pieces spread evenly over a split larger than COUNTED_TOKENS."""
    pieces = _pieces(0, index.num_tokens)
    step = max(1, round(index.num_tokens / COUNTED_TOKENS))
    return _counts((index.window(start, length) for start, length in pieces[::step]), vocab_size)


def _pieces(start: int, tokens: int) -> list[tuple[int, int]]:
    stop = start + tokens
    return [(at, min(PIECE_TOKENS, stop - at)) for at in range(start, stop, PIECE_TOKENS)]


def _counts(pieces: Iterator[npt.NDArray[Any]], vocab_size: int) -> npt.NDArray[np.int64]:
    counts = np.zeros(vocab_size, np.int64)
    for piece in pieces:
        counts += np.bincount(piece, minlength=vocab_size)
    return counts
