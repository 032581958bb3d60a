"""One decision for all ranks, such as where a run lives: rank 0 takes it, the others hear it."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from flextrain.errors import FlextrainError, unpack
from flextrain.world import World

Value = TypeVar("Value")


def from_rank_0(world: World, decide: Callable[[], Value]) -> Value:
    """What `decide` returns on rank 0, which alone calls it; a FlextrainError in it is raised on every rank.

    Every rank of the process group calls it; a world of one needs no group.
    """
    if world.size == 1:
        return decide()
    told: list[Any] = [_packed(decide) if world.is_main else None]
    dist.broadcast_object_list(told)
    if "kind" in told[0]:
        raise unpack(told[0])
    value: Value = told[0]["value"]
    return value


def _packed(decide: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": decide()}
    except FlextrainError as error:
        return error.pack()
