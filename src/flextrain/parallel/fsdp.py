"""Sharded weights: fully_shard (FSDP2) per block, then the root; gradients are sums over ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from flextrain.model.blocks import transformer_blocks


def shard(model: nn.Module, mesh: DeviceMesh, *, bf16: bool, reshard_after_forward: bool) -> nn.Module:
    """Shard a model in place over `mesh`. Names of parameters stay as they are; each becomes a DTensor.

    With `reshard_after_forward` gathered weights are freed between forward and backward (ZeRO-3), else kept (ZeRO-2).
    """
    _take_rank_0s_weights(model)
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
    for block in transformer_blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Both are needed: gloo has no premultiplied sum, and the default divides by the number of ranks.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    return model


def _take_rank_0s_weights(model: nn.Module) -> None:
    """Give every rank rank 0's weights where they differ, as DDP does.

    Each rank keeps a shard of its own copy, so models that were initialised apart would make a patchwork. Equal ones,
    the usual case, cost one sum of each tensor.
    """
    tensors = [tensor.data for tensor in (*model.parameters(), *model.buffers())]
    sums = torch.stack([tensor.double().sum() for tensor in tensors])
    lowest, highest = sums.clone(), sums.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    if not torch.equal(lowest, highest):
        for tensor in tensors:
            dist.broadcast(tensor, src=0)
