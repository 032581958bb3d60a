"""A training state as named tensors, and the boxes of them that one rank holds and writes.

Names: `model.<parameter or buffer>` and `optim.<parameter>.<state>`, the same on every world size and strategy.
"""

import mmap
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

State = dict[str, Tensor]
LARGE_BYTES = 1 << 16  # of a tensor worth a mapping of its own


@dataclass(frozen=True)
class Box:
    """This rank's part of a tensor: `local` (shares memory with it) begins at index `start` of the full `shape`."""

    name: str
    local: Tensor
    start: tuple[int, ...]
    shape: tuple[int, ...]


def model_state(model: nn.Module) -> State:
    """Parameters, tied ones once, and persistent buffers, by name; the tensors themselves, not copies."""
    state = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    persistent = model.state_dict(keep_vars=True).keys()
    return state | {f"model.{name}": buffer.detach() for name, buffer in model.named_buffers() if name in persistent}


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Every tensor the optimizer keeps per parameter, by the parameter's name."""
    state: State = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"optim.{name}.{key}"] = value
    return state


def allocate_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer that has taken no step yet create its state tensors, as zeros; weights stay as they are.

    Only a step creates them, so it takes one of zero gradient and rate. Adam's are known beforehand.
    """
    if optimizer.state:
        return
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        _allocate_adam(optimizer)
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    decays = [group.get("weight_decay", 0.0) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 0.0, 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate, decay in zip(optimizer.param_groups, rates, decays, strict=True):
        group["lr"], group["weight_decay"] = rate, decay
    for value in optimizer_state(model, optimizer).values():
        value.zero_()


def _allocate_adam(optimizer: torch.optim.Optimizer) -> None:
    default = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    for group in optimizer.param_groups:
        moments = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
        dtype = torch.float32 if group["fused"] else default
        for parameter in group["params"]:
            place = parameter.device if group["fused"] or group["capturable"] else "cpu"
            step = torch.zeros((), dtype=dtype, device=place)
            optimizer.state[parameter] = {"step": step, **{key: untouched_zeros(parameter) for key in moments}}


def untouched_zeros(like: Tensor) -> Tensor:
    """Zeros of the same kind. On the CPU the system hands out their pages when they are first written: a load then
    takes no longer than it must, since page faults cost more than copying and its threads share them."""
    if isinstance(like, DTensor) or like.device.type != "cpu" or like.nbytes < LARGE_BYTES or not like.is_contiguous():
        return torch.zeros_like(like, memory_format=torch.preserve_format)
    block = mmap.mmap(-1, like.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(block, dtype=like.dtype).view(like.shape)


def local_boxes(state: State) -> list[Box]:
    """What this rank holds of every tensor; empty boxes are left out."""
    boxes = [_box(name, tensor) for name, tensor in state.items()]
    return [box for box in boxes if box.local.numel()]


def boxes_to_write(state: State) -> list[Box]:
    """What this rank writes: its own shards, and its part of the replicated tensors, each of which one rank writes."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    writers = _writers(state)
    boxes = [(_box(name, tensor), tensor) for name, tensor in state.items()]
    mine = [b for b, t in boxes if isinstance(t, DTensor) and _is_first_replica(t) and b.local.numel()]
    return mine + [box for box, tensor in boxes if not isinstance(tensor, DTensor) and writers[box.name] == rank]


def spread(state: State) -> None:
    """Give what `boxes_to_write` lets one rank hold to the others that hold it too. Called by all ranks together."""
    if not dist.is_initialized():
        return
    writers = _writers(state)
    for name, tensor in state.items():
        if not isinstance(tensor, DTensor):
            _broadcast(tensor, None, writers[name])
            continue
        for axis, placement in enumerate(tensor.placements):
            if isinstance(placement, Replicate) and tensor.to_local().numel():
                group = tensor.device_mesh.get_group(axis)
                _broadcast(tensor.to_local(), group, dist.get_global_rank(group, 0))


def _broadcast(tensor: Tensor, group: dist.ProcessGroup | None, source: int) -> None:
    """As bytes, since not every backend knows every dtype."""
    whole = tensor.detach().contiguous()
    dist.broadcast(whole.reshape(-1).view(torch.uint8), source, group=group)
    if whole.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(whole)


def _writers(state: State) -> dict[str, int]:
    """Which rank writes each replicated tensor: dealt out largest first, always to the rank with the least so far, so
    that all finish together. Every rank decides the same."""
    load = [0] * (dist.get_world_size() if dist.is_initialized() else 1)
    replicated = [(-t.nbytes, name) for name, t in state.items() if not isinstance(t, DTensor)]
    writers = {}
    for negated_bytes, name in sorted(replicated):
        writers[name] = load.index(min(load))
        load[writers[name]] -= negated_bytes
    return writers


def _box(name: str, tensor: Tensor) -> Box:
    if not isinstance(tensor, DTensor):
        return Box(name, tensor, (0,) * tensor.ndim, tuple(tensor.shape))
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local()
    assert tuple(local.shape) == tuple(shape) or not prod(shape), (name, local.shape, shape)
    return Box(name, local, tuple(start), tuple(tensor.shape))


def _is_first_replica(tensor: DTensor) -> bool:
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(
        c == 0 for c, placement in zip(coordinate, tensor.placements, strict=True) if isinstance(placement, Replicate)
    )
