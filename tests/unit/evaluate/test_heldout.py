"""Held-out figures against a model whose every probability is known, and the baselines against plain counting."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from flextrain.data import TokenIndexFile
from flextrain.errors import DataError
from flextrain.evaluate import baselines as baselines_module
from flextrain.evaluate import loss as loss_module
from flextrain.evaluate.baselines import baselines, token_counts
from flextrain.evaluate.loss import HeldoutScore, heldout, scored_text_bytes
from flextrain.model import build_model, tiny


class Bigram(nn.Module):
    """Logits that depend on the last token alone, so that where windows begin makes no difference."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        weights = torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(0))
        self.logits = nn.Embedding.from_pretrained(weights)
        self.longest = 0

    def forward(self, input_ids: Tensor) -> Tensor:
        self.longest = max(self.longest, input_ids.shape[1])
        return self.logits(input_ids)

    def expected(self, ids: np.ndarray) -> tuple[float, float]:
        """Mean loss and accuracy over ids[1:]."""
        log_p = self.logits.weight.double().log_softmax(-1).numpy()
        losses = -log_p[ids[:-1], ids[1:]]
        return losses.mean(), (log_p.argmax(-1)[ids[:-1]] == ids[1:]).mean()


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seq_length=st.integers(1, 400), batch_size=st.integers(1, 20), max_tokens=st.none() | st.integers(1, 500))
def test_every_token_is_scored_once_however_they_are_cut(
    index: TokenIndexFile, seq_length: int, batch_size: int, max_tokens: int | None
) -> None:
    model = Bigram(index.vocab_size)
    score = heldout(model, index, seq_length=seq_length, batch_size=batch_size, max_tokens=max_tokens)
    tokens = min(index.num_tokens - 1, max_tokens or index.num_tokens)
    loss, accuracy = model.expected(index.window(0, tokens + 1))
    assert score.tokens == tokens
    assert score.loss == pytest.approx(loss, rel=1e-6)
    assert score.accuracy == pytest.approx(accuracy)
    assert model.longest == min(seq_length, tokens)


def test_logits_of_a_batch_stay_small(index: TokenIndexFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "LOGITS_BYTES", 2 * 4 * 10 * index.vocab_size)
    sizes: list[int] = []
    model = Bigram(index.vocab_size)
    model.register_forward_hook(lambda module, args, out: sizes.append(args[0].shape[0]))
    heldout(model, index, seq_length=10, batch_size=16)
    assert max(sizes) == 2


def test_gpt_is_scored_and_left_in_the_mode_it_was_in(index: TokenIndexFile) -> None:
    model = build_model(tiny(num_layers=1), vocab_size=index.vocab_size, seq_length=32, seed=0)
    for training in (True, False):
        model.train(training)
        score = heldout(model, index, seq_length=32)
        assert model.training is training
        assert score.loss == pytest.approx(math.log(index.vocab_size), rel=0.02), "an untrained model knows nothing"
    assert all(p.grad is None for p in model.parameters())


def test_bytes_are_those_of_the_scored_text_without_ends_of_documents(index: TokenIndexFile) -> None:
    tokenizer = index.tokenizer()
    first = len(tokenizer.decode(index.window(0, 1)).encode())
    assert scored_text_bytes(index, index.num_tokens - 1) == index.text_bytes - first
    ends = index.document_ends[:3].tolist()
    texts = [tokenizer.decode(index.window(a, b - 1 - a)) for a, b in zip([1, *ends], ends, strict=False)]
    assert scored_text_bytes(index, ends[2] - 1) == len("".join(texts).encode())


def test_bits_per_byte_and_perplexity_follow_from_the_loss() -> None:
    score = HeldoutScore(loss=math.log(256), accuracy=0, tokens=100, text_bytes=400)
    assert score.bits_per_byte == pytest.approx(2.0)  # 8 bits per token of 4 bytes
    assert score.perplexity == pytest.approx(256)
    assert HeldoutScore(1e6, 0, 1, 1).perplexity == math.inf


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_a_split_with_nothing_to_score_is_refused(num_tokens: int) -> None:
    empty = SimpleNamespace(split="heldout", url="/indexes/x", num_tokens=num_tokens)
    with pytest.raises(DataError, match=f"heldout split of /indexes/x has {num_tokens} tokens") as caught:
        heldout(nn.Linear(1, 1), empty, seq_length=4)  # type: ignore[arg-type]
    assert "heldout_fraction" in caught.value.remedy


def test_baselines_are_what_counting_gives(index: TokenIndexFile) -> None:
    train = index.other("train")
    tokens = index.num_tokens - 1
    found = baselines(train, index, tokens)
    counts = [list(train.tokens).count(i) for i in range(index.vocab_size)]
    scored = list(index.tokens)[1:]
    total = sum(counts) + index.vocab_size
    assert found.unigram_loss == pytest.approx(-sum(math.log((counts[i] + 1) / total) for i in scored) / tokens)
    assert found.unigram_accuracy == pytest.approx(scored.count(counts.index(max(counts))) / tokens)
    assert found.uniform_loss == math.log(index.vocab_size)
    assert found.unigram_loss < found.uniform_loss


def test_a_large_training_split_is_counted_in_pieces_from_all_over(
    index: TokenIndexFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = index.other("train")
    whole = token_counts(train, index.vocab_size)
    assert whole.sum() == train.num_tokens
    monkeypatch.setattr(baselines_module, "PIECE_TOKENS", 10)
    monkeypatch.setattr(baselines_module, "COUNTED_TOKENS", train.num_tokens // 4)
    part = token_counts(train, index.vocab_size)
    assert part.sum() == pytest.approx(train.num_tokens / 4, rel=0.05)
    assert np.abs(part / part.sum() - whole / whole.sum()).max() < 0.05
