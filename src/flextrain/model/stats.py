"""Parameters, floating-point operations and memory of a model, counted without running it."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from flextrain.errors import ModelError
from flextrain.model.blocks import transformer_blocks

ADAMW_MOMENTS = 2


def count_parameters(model: nn.Module) -> int:
    """Parameters, a tied weight counted once; works on the meta device."""
    return sum(parameter.numel() for parameter in model.parameters())


def flops_per_token(model: nn.Module, seq_length: int) -> int:
    """Floating-point operations of forward and backward per token, as MFU is usually given (PaLM, appendix B).

    6 per matrix weight that a token is multiplied with (the head counts, tied or not; looking up an embedding does
    not), and 12 * layers * width * seq_length for attention over the whole square, causal or not.
    GPT-2 124M at 1,024 tokens: 854.7 million. Experts that a token skips are counted too.
    """
    multiplied = {
        id(weight): weight.numel()
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for weight in module.parameters(recurse=False)
        if weight.dim() >= 2
    }
    layers, width = _attention_shape(model)
    return 6 * sum(multiplied.values()) + 12 * layers * width * seq_length


def _attention_shape(model: nn.Module) -> tuple[int, int]:
    """(layers, heads * head width) from the model's configuration, ours or transformers'; zeros where it has none."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    if hasattr(config, "d_model") and hasattr(config, "num_layers"):
        return config.num_layers, config.d_model
    layers, heads = getattr(config, "num_hidden_layers", 0), getattr(config, "num_attention_heads", 0)
    head_width = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // max(1, heads)
    return layers, heads * head_width


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes per rank, without activations and the allocator's slack."""

    weights: int
    gradients: int
    optimizer: int
    compute_copy: int
    """Weights as the matrices see them, besides the masters: gathered shards, autocast's bf16 copies."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.compute_copy


def training_memory_bytes(
    model: nn.Module, *, strategy: str, world_size: int, ranks_per_node: int = 1, bf16: bool = False
) -> TrainingMemory:
    """Peak bytes per rank of weights, gradients and AdamW's moments under a strategy.

    ddp holds all of them; fsdp (zero3) a share of each, plus two gathered blocks (one at work, one on its way) and
    what lies outside the blocks; zero2 a share and every weight gathered; hsdp is fsdp within `ranks_per_node`.
    Raises ModelError for another strategy.
    """
    shards = {"ddp": 1, "fsdp": world_size, "zero3": world_size, "zero2": world_size, "hsdp": ranks_per_node}
    if strategy not in shards:
        raise ModelError(
            f"no memory model for strategy {strategy!r}", number=5, remedy=f"ask for one of {', '.join(shards)}"
        )
    parameters, item = count_parameters(model), next(model.parameters()).element_size()
    share = -(-parameters // shards[strategy]) * item
    compute_item = 2 if bf16 else item
    if strategy == "ddp":
        copied = parameters if bf16 else 0
    else:
        copied = parameters if strategy == "zero2" else _gathered_at_once(model)
    return TrainingMemory(share, share, ADAMW_MOMENTS * share, copied * compute_item)


def _gathered_at_once(model: nn.Module) -> int:
    sizes = sorted((count_parameters(block) for block in transformer_blocks(model)), reverse=True)
    return count_parameters(model) - sum(sizes) + sum(sizes[:2])
