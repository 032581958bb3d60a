"""Sharded weights: fully_shard (FSDP2) per block, then the root; gradients are sums over ranks."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from flextrain.model.blocks import transformer_blocks


def shard(model: nn.Module, mesh: DeviceMesh, *, bf16: bool, reshard_after_forward: bool) -> nn.Module:
    """Shard a model in place over `mesh`. Names of parameters stay as they are; each becomes a DTensor.

    With `reshard_after_forward` gathered weights are freed between forward and backward (ZeRO-3), else kept (ZeRO-2).
    """
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
