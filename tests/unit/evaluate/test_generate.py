"""Generation: deterministic, within the vocabulary and the context, and ending where the text does."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import GPT2Config

from flextrain.config import ModelConfig
from flextrain.data import TokenIndexFile
from flextrain.data.tokenizer import Tokenizer
from flextrain.evaluate.generate import generate, next_token
from flextrain.model import build_model, gpt2_124m


class Chain(nn.Module):
    """Says `text` token by token, then the end of text; ids beyond the tokenizer's look likeliest of all."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        super().__init__()
        self.script, self.vocab_size = [*tokenizer.encode(text), tokenizer.end_of_text], tokenizer.vocab_size
        self.unused = nn.Parameter(torch.zeros(1))
        self.lengths: list[int] = []

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = torch.zeros(*input_ids.shape, self.vocab_size + 8)
        logits[..., int(self.script[len(self.lengths)])] = 50.0
        logits[..., self.vocab_size :] = 99.0
        self.lengths.append(input_ids.shape[1])
        return logits


@pytest.fixture
def tokenizer(index: TokenIndexFile) -> Tokenizer:
    return index.tokenizer()


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_text_ends_before_the_end_of_text(tokenizer: Tokenizer, temperature: float) -> None:
    model = Chain(tokenizer, " return naïve 𝄞")
    text = generate(model, tokenizer, "if", max_new_tokens=50, seq_length=64, temperature=temperature)
    assert text == " return naïve 𝄞"


def test_text_ends_after_the_tokens_that_were_asked_for(tokenizer: Tokenizer) -> None:
    model = Chain(tokenizer, " return" * 30)
    text = generate(model, tokenizer, "if", max_new_tokens=5, seq_length=64, temperature=0)
    assert text == tokenizer.decode(tokenizer.encode(" return" * 30)[:5])
    assert generate(model, tokenizer, "if", max_new_tokens=0, seq_length=64) == ""


def test_the_model_sees_the_newest_tokens_that_fit(tokenizer: Tokenizer) -> None:
    model = Chain(tokenizer, "pass" * 10)
    generate(model, tokenizer, "if", max_new_tokens=6, seq_length=3, temperature=0)
    assert model.lengths == [1, 2, 3, 3, 3, 3]


def test_an_empty_prompt_begins_a_document(tokenizer: Tokenizer) -> None:
    model = Chain(tokenizer, "pass")
    assert generate(model, tokenizer, "", max_new_tokens=9, seq_length=8, temperature=0) == "pass"
    assert model.lengths[0] == 1


def test_one_seed_gives_one_text_and_leaves_the_global_generator_alone(tokenizer: Tokenizer) -> None:
    config = gpt2_124m(vocab_size=None, d_model=32, num_layers=1, num_heads=2, d_ff=32)
    model = build_model(config, vocab_size=tokenizer.vocab_size, seq_length=16, seed=0)
    state = torch.get_rng_state()
    texts = [
        generate(model, tokenizer, "if", max_new_tokens=40, seq_length=16, temperature=1.0, seed=seed)
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training


def test_transformers_models_generate_alike(tokenizer: Tokenizer, tmp_path: Path) -> None:
    GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=16).save_pretrained(tmp_path)
    model = build_model(ModelConfig(name=str(tmp_path)), vocab_size=tokenizer.vocab_size, seq_length=16, seed=0)
    greedy = generate(model, tokenizer, "if", max_new_tokens=20, seq_length=16, temperature=0)
    assert greedy == generate(model, tokenizer, "if", max_new_tokens=20, seq_length=16, temperature=1.0, top_k=1)
    assert greedy


@given(
    logits=st.lists(st.floats(-50, 50), min_size=1, max_size=20, unique=True),
    top_k=st.none() | st.integers(1, 30),
    temperature=st.sampled_from([0.0, 1e-300, 0.7, 1e9]),
    seed=st.integers(0, 99),
)
def test_a_drawn_token_is_among_the_likeliest(
    logits: list[float], top_k: int | None, temperature: float, seed: int
) -> None:
    token = next_token(
        torch.tensor(logits, dtype=torch.float64), temperature, top_k, torch.Generator().manual_seed(seed)
    )
    rank = sorted(logits, reverse=True).index(logits[token])
    assert rank < (top_k or len(logits))
    if temperature < 1e-9:
        assert rank == 0


def test_draws_follow_the_softmax_at_that_temperature() -> None:
    logits, generator = torch.tensor([2.0, 1.0, 0.0, -9.0]), torch.Generator().manual_seed(0)
    draws = torch.tensor([next_token(logits, 2.0, 3, generator) for _ in range(4000)])
    expected = (logits[:3] / 2.0).softmax(0)
    torch.testing.assert_close(torch.bincount(draws, minlength=3) / 4000, expected, rtol=0, atol=0.03)
