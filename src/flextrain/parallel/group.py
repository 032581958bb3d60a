"""The default process group: how ranks meet, and what they talk over."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from flextrain.config.schema import DistributedConfig
from flextrain.errors import ConfigError, GangError
from flextrain.world import World


def join_group(world: World, config: DistributedConfig, store: dist.Store | None = None) -> torch.device:
    """Join the process group of `world`; returns this rank's device. A world of one needs no group.

    `store` is where ranks meet; None takes MASTER_ADDR and MASTER_PORT, as torchrun sets them. CPU tensors always
    travel over gloo, so that small facts can be exchanged without touching a GPU.
    Raises GangError where the peers do not arrive within `timeout_s`.
    """
    cuda = torch.cuda.is_available() and config.backend != "gloo"
    device = torch.device("cuda", world.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if config.communication_pattern != "auto":
        if not cuda:
            raise ConfigError(
                f"distributed.communication_pattern {config.communication_pattern} steers NCCL, which needs GPUs",
                number=20,
                remedy="set it to auto on CPU",
            )
        os.environ["NCCL_ALGO"] = config.communication_pattern.capitalize()
    if world.size == 1 or dist.is_initialized():
        return device
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    timeout = timedelta(seconds=config.timeout_s)
    meeting = {"store": store} if store is not None else {"init_method": "env://"}
    try:
        dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=timeout, **meeting)
    except (RuntimeError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise GangError(
            f"rank {world.rank} of {world.size} could not join its peers: {reason}",
            number=3,
            remedy="check that every node runs and can reach node 0, then start again",
        ) from error
    return device


def leave_group() -> None:
    """Tear the group down, where there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
