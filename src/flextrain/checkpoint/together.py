"""What all ranks do together around a checkpoint: agree on one choice, or fail as one."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from flextrain.errors import CheckpointError, FlextrainError, unpack


def own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def most(number: int) -> int:
    """The largest of what all ranks say; raises what torch raises where one of them is gone."""
    if not dist.is_initialized() or "cpu" not in dist.get_backend_config():
        return number
    found = torch.tensor(number)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def agree(choose: Callable[[], Any]) -> Any:
    """Rank 0's choice, on every rank; where it raised, raise on all of them."""
    if not dist.is_initialized():
        return choose()
    result, error = _tried(choose) if own_rank() == 0 else (None, None)
    told = [(result, _packed(error))]
    dist.broadcast_object_list(told, src=0)
    if error:
        raise error
    result, packed = told[0]
    if packed:
        raise unpack({**packed, "message": f"rank 0: {packed['message']}"})
    return result


def all_or_none(action: Callable[[], Any]) -> list[Any]:
    """Run `action` on every rank and gather the results in order of rank; where any raised, raise on all of them.

    The kind of error survives the journey: corrupt data are told from a wrong model, wherever they were found.
    """
    result, error = _tried(action)
    if not dist.is_initialized():
        if error:
            raise error
        return [result]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (result, _packed(error)))
    for rank, (_, packed) in enumerate(gathered):  # the first one, on all: what they do about it must be the same
        if error and rank == own_rank():
            raise error
        if packed:
            raise unpack({**packed, "message": f"rank {rank}: {packed['message']}"})
    return [value for value, _ in gathered]


def _tried(action: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """An error is reported to the others before it is raised: a silent rank would strand them."""
    try:
        return action(), None
    except Exception as caught:
        return None, caught


def _packed(error: Exception | None) -> dict[str, Any] | None:
    if error is None:
        return None
    if isinstance(error, FlextrainError):
        return error.pack()
    unexpected = CheckpointError(f"{type(error).__name__}: {error}", number=7, remedy="see the log of that rank")
    return unexpected.pack()
