"""One function turns a plain model into a parallel one, in a fixed order: device, compile, shard or replicate."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from flextrain.config.schema import Config
from flextrain.model.blocks import transformer_blocks
from flextrain.model.stats import count_parameters
from flextrain.parallel.ddp import replicate
from flextrain.parallel.fsdp import shard
from flextrain.parallel.mesh import make_mesh
from flextrain.world import World

AUTO_SHARDS_FROM_PARAMETERS = 100_000_000


@dataclass(frozen=True)
class Parallelized:
    """`module` is what forward is called on; `plain` holds the same parameters under their plain names."""

    module: nn.Module
    plain: nn.Module
    device: torch.device
    bf16: bool

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Around one micro-batch: replicated gradients travel with the last one only. Sharded ones always do, since
        keeping them whole until then would undo the memory that sharding saves."""
        if isinstance(self.module, DistributedDataParallel) and not last:
            return self.module.no_sync()
        return nullcontext()

    def compute(self) -> AbstractContextManager[object]:
        """The precision context of a forward pass (FSDP2 brings its own)."""
        if self.bf16 and not isinstance(self.module, FSDPModule):
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def clip_gradients(self, max_norm: float | None) -> torch.Tensor:
        """Scale gradients to a global norm of at most `max_norm`; returns the norm before, a 0-d tensor on device."""
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), float("inf") if max_norm is None else max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


def resolve_strategy(config: Config, model: nn.Module) -> str:
    """`auto` and the aliases made plain: ddp, fsdp, zero2 or hsdp."""
    strategy = config.distributed.strategy
    if strategy == "auto":
        return "ddp" if count_parameters(model) < AUTO_SHARDS_FROM_PARAMETERS else "fsdp"
    return "fsdp" if strategy == "zero3" else strategy


def parallelize(model: nn.Module, config: Config, world: World, device: torch.device) -> Parallelized:
    """Move `model` to `device` and spread it over `world` as the configuration says.

    The process group must exist where the world is larger than one. Raises ConfigError for a mesh that cannot be.
    """
    precision = config.distributed.mixed_precision
    bf16 = precision == "bf16" or (precision == "auto" and device.type == "cuda" and config.model.dtype == "fp32")
    strategy = resolve_strategy(config, model)
    model.to(device)
    if config.training.compile:
        for block in transformer_blocks(model):
            block.compile()
    mesh = make_mesh(world, strategy, device.type)
    if world.size == 1:
        return Parallelized(model, model, device, bf16)
    if mesh is None:
        return Parallelized(replicate(model, device), model, device, bf16)
    sharded = shard(model, mesh, bf16=bf16, reshard_after_forward=strategy != "zero2")
    return Parallelized(sharded, sharded, device, bf16)
