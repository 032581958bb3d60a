"""A nesting of dicts, lists and tuples as tensors by name, and as JSON that says where each of them stood."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flextrain.checkpoint.shards import State
from flextrain.errors import CheckpointCorrupt, CheckpointError

SCALARS = (bool, int, float, str, type(None))


class Flattener:
    """Gathers tensors in `state`; one that stands in several places, as tied weights do, is there once."""

    def __init__(self) -> None:
        self.state: State = {}
        self._names: dict[object, str] = {}

    def take(self, value: Any, name: str) -> Any:
        """`value` as JSON, its tensors by names that begin with `name`. Raises CheckpointError for anything else."""
        if isinstance(value, SCALARS):
            return value
        if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta:
            return {"tensor": self._add(value, name)}
        if isinstance(value, Mapping) and all(isinstance(key, SCALARS) for key in value):
            return {"dict": [[key, self.take(item, f"{name}.{key}")] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [self.take(item, f"{name}.{i}") for i, item in enumerate(value)]}
        raise CheckpointError(
            f"{name} is a {_kind(value)}, which a checkpoint cannot hold",
            number=44,
            remedy="save dense tensors, numbers, text, None, and dicts, lists and tuples of them",
        )

    def _add(self, tensor: Tensor, name: str) -> str:
        first = self._names.setdefault(_identity(tensor), name)
        if first == name:
            if name in self.state:
                raise CheckpointError(f"two tensors would be called {name}", number=44, remedy="rename one of the keys")
            self.state[name] = tensor.detach()
        return first


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return "tensor without data (on the meta device)" if value.is_meta else f"tensor of layout {value.layout}"


def unflatten(body: Any, state: State, where: str) -> Any:
    """What was taken apart. Raises CheckpointCorrupt, naming `where`, for anything that `Flattener` does not write."""
    try:
        return _build(body, state)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointCorrupt(
            f"{where}: its record of how tensors are nested is unsound ({error})",
            number=45,
            remedy="use an older checkpoint",
        ) from error


def _build(body: Any, state: State) -> Any:
    if isinstance(body, SCALARS):
        return body
    ((kind, inside),) = body.items()
    if kind == "tensor":
        return state[inside]
    if kind == "dict":
        return {key: _build(item, state) for key, item in inside}
    if kind not in ("list", "tuple"):
        raise ValueError(f"unknown kind {kind!r}")
    items = [_build(item, state) for item in inside]
    return items if kind == "list" else tuple(items)


def _identity(tensor: Tensor) -> object:
    """Equal for tensors that are the same memory, seen in the same way."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not local.numel():
        return id(tensor)
    return local.data_ptr(), local.dtype, tuple(local.shape), local.stride(), local.device, tuple(tensor.shape)
