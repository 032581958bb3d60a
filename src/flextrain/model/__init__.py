"""The network: a plain decoder of our own, or any causal language model of `transformers`."""

import torch
from torch import nn

from flextrain.config import ModelConfig
from flextrain.errors import ModelError
from flextrain.model.blocks import transformer_blocks
from flextrain.model.gpt import GPT
from flextrain.model.hub import build_causal_lm
from flextrain.model.loss import token_loss_sum
from flextrain.model.presets import gpt2_124m, llama_7b, tiny
from flextrain.model.stats import count_parameters, flops_per_token, training_memory_bytes

__all__ = [
    "GPT",
    "build_model",
    "count_parameters",
    "flops_per_token",
    "gpt2_124m",
    "llama_7b",
    "tiny",
    "token_loss_sum",
    "training_memory_bytes",
    "transformer_blocks",
]


def build_model(config: ModelConfig, *, vocab_size: int, seq_length: int, seed: int | None) -> nn.Module:
    """The configured model on the CPU in master precision, the same for the same seed; global RNGs stay as they were.

    `vocab_size` is the tokenizer's; `config.vocab_size` may be larger (padding for the hardware's sake) but not
    smaller. Without a seed, weights that would be drawn are left as memory came, for a checkpoint to fill. Raises
    ModelError where they do not fit or the model cannot be had.
    """
    if config.name != "gpt":
        return build_causal_lm(config, vocab_size=vocab_size, seq_length=seq_length, seed=seed or 0)
    if config.vocab_size is not None and config.vocab_size < vocab_size:
        raise ModelError(
            f"model.vocab_size is {config.vocab_size} and the tokenizer has {vocab_size} tokens",
            number=1,
            remedy=f"set model.vocab_size to at least {vocab_size}, or leave it out to take the tokenizer's",
        )
    with torch.device("meta"):
        model = GPT(config, vocab_size=config.vocab_size or vocab_size, seq_length=seq_length)
    model.to_empty(device="cpu")
    if seed is None:
        model.tie_weights()
    else:
        model.init_weights(torch.Generator().manual_seed(seed))
    return model
