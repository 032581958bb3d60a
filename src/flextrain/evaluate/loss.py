"""Held-out loss over windows that do not overlap, so that every token is scored once.

Shapes: B windows, T tokens, V vocabulary.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flextrain.data import TokenIndexFile
from flextrain.errors import DataError
from flextrain.model.loss import cross_entropy_sum, logits_of

LOGITS_BYTES = 256 << 20  # held at a time


@dataclass(frozen=True)
class HeldoutScore:
    """Token-weighted: `loss` in nats per token, `accuracy` the share of tokens that were the likeliest guess."""

    loss: float
    accuracy: float
    tokens: int
    text_bytes: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Bits to encode the text with this model, ends of documents included, per UTF-8 byte of it."""
        return self.loss * self.tokens / math.log(2) / self.text_bytes


@contextmanager
def evaluating(model: nn.Module) -> Iterator[torch.device]:
    """Evaluation mode without gradients; yields the model's device, and puts the mode back."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield next(model.parameters()).device
    finally:
        model.train(was_training)


def heldout(
    model: nn.Module, index: TokenIndexFile, *, seq_length: int, batch_size: int = 16, max_tokens: int | None = None
) -> HeldoutScore:
    """Score the first `max_tokens` tokens after the very first of a split, each seen with what its window holds before.

    Works for GPT and for `transformers` models. Raises DataError where the split has nothing to score.
    """
    tokens = scored_tokens(index, max_tokens)
    fitting = max(1, LOGITS_BYTES // (4 * seq_length * index.vocab_size))
    loss, correct = 0.0, 0
    with evaluating(model) as device:
        for windows_BT in _windows(index, tokens, seq_length, min(batch_size, fitting)):
            inputs_BT, labels_BT = windows_BT[:, :-1].to(device), windows_BT[:, 1:].to(device)
            logits_BTV = logits_of(model, inputs_BT)
            loss += float(cross_entropy_sum(logits_BTV.flatten(0, 1), labels_BT.flatten()))
            correct += int((logits_BTV.argmax(-1) == labels_BT).sum())
    return HeldoutScore(loss / tokens, correct / tokens, tokens, scored_text_bytes(index, tokens))


def scored_tokens(index: TokenIndexFile, max_tokens: int | None) -> int:
    """How many tokens are scored: all but the first, which nothing comes before, up to `max_tokens`."""
    tokens = min(index.num_tokens - 1, max_tokens or index.num_tokens)
    if tokens < 1:
        raise DataError(
            f"the {index.split} split of {index.url} has {index.num_tokens} tokens, too few to score any",
            number=40,
            remedy="raise data.heldout_fraction or add documents, and build the index again",
        )
    return tokens


def scored_text_bytes(index: TokenIndexFile, tokens: int) -> int:
    """UTF-8 bytes of the text that tokens [1, 1 + tokens) spell, decoded document by document."""
    tokenizer = index.tokenizer()
    size_bytes, start, last = 0, 1, 1 + tokens
    for end in index.document_ends.tolist():
        ids = index.window(start, max(0, min(end, last) - start))
        size_bytes += len(tokenizer.decode(ids[ids != tokenizer.end_of_text]).encode())
        start = max(start, end)
        if start >= last:
            break
    return max(1, size_bytes)


def _windows(index: TokenIndexFile, tokens: int, seq_length: int, batch_size: int) -> Iterator[Tensor]:
    """Windows (B, T + 1), each beginning with the last token of the one before; the rest comes alone, shorter."""
    whole, rest = divmod(tokens, seq_length)
    starts = torch.arange(whole) * seq_length
    for batch in starts.split(batch_size) if whole else ():
        yield torch.from_numpy(index.gather(batch.numpy(), seq_length + 1))
    if rest:
        yield torch.from_numpy(index.gather([whole * seq_length], rest + 1))
