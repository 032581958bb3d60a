"""Sampling text from a model, token by token, the same for the same seed."""

import torch
from torch import Tensor, nn

from flextrain.data.tokenizer import Tokenizer
from flextrain.errors import ModelError
from flextrain.evaluate.loss import evaluating
from flextrain.model.loss import logits_of


def generate(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int,
    seq_length: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
) -> str:
    """The continuation of `prompt` (without it): up to `max_new_tokens`, ending before the end of text.

    The model sees the last `seq_length` tokens. An empty prompt starts a document. Works for GPT and `transformers`
    models alike; without a cache, as samples are few and short.
    """
    ids = [int(i) for i in tokenizer.encode(prompt)] or [tokenizer.end_of_text]
    start = len(ids)
    generator = torch.Generator().manual_seed(seed)
    with evaluating(model) as device:
        while len(ids) < start + max_new_tokens:
            logits_BTV = logits_of(model, torch.tensor([ids[-seq_length:]], device=device))
            token = next_token(logits_BTV[0, -1, : tokenizer.vocab_size], temperature, top_k, generator)
            if token == tokenizer.end_of_text:
                break
            ids.append(token)
    return tokenizer.decode(ids[start:])


def next_token(logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """Draw one id: the likeliest at temperature 0, else from the softmax over the `top_k` likeliest (None: all)."""
    logits = logits_V.detach().to("cpu", torch.float64)
    if not logits.isfinite().all():
        raise ModelError(
            "the model's outputs are not finite: nothing can be drawn from them",
            number=21,
            remedy="evaluate an earlier checkpoint; this one was saved after training had diverged",
        )
    if temperature == 0:
        return int(logits.argmax())
    values, ids = logits.topk(min(top_k or len(logits), len(logits)))
    weights = ((values - values[0]) / temperature).softmax(0)
    return int(ids[torch.multinomial(weights, 1, generator=generator)])
