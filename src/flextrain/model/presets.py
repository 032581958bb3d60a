"""The named shapes as functions: `gpt2_124m(dtype="fp64")` is that preset with one key changed."""

from typing import Any

from flextrain.config import ModelConfig


def tiny(**overrides: Any) -> ModelConfig:
    """About a million parameters with a vocabulary of 4,096: learns on a laptop in minutes."""
    return ModelConfig(preset="tiny", **overrides)


def gpt2_124m(**overrides: Any) -> ModelConfig:
    """GPT-2 small (Radford et al. 2019), without biases."""
    return ModelConfig(preset="gpt2-124m", **overrides)


def llama_7b(**overrides: Any) -> ModelConfig:
    """LLaMA 7B (Touvron et al. 2023): 6.74 billion parameters."""
    return ModelConfig(preset="llama-7b", **overrides)
