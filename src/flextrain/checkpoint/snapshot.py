"""Torch's side of the arena: the layout of a state, and the one batched copy that takes a snapshot."""

from collections.abc import Collection

import torch
from torch import Tensor

from flextrain.checkpoint.arena import ALIGN_BYTES, Arena, Layout, Place, padded
from flextrain.checkpoint.gpu import Lane, pin
from flextrain.checkpoint.shards import Box

GPU = "cuda"  # where copies need not be waited for


def layout_of(boxes: list[Box]) -> Layout:
    """Where each box goes in a slot, in the order given."""
    places, offset = [], 0
    for box in boxes:
        dtype = str(box.local.dtype).removeprefix("torch.")
        size_bytes = box.local.nbytes
        places.append(Place(box.name, dtype, box.start, tuple(box.local.shape), box.shape, offset, size_bytes))
        offset += padded(size_bytes, ALIGN_BYTES)
    return Layout(tuple(places), offset)


class Snapshots:
    """Copies of one set of boxes in an arena's slots. From GPUs they are made on streams of their own, beside the next
    forward and backward; `settled` says when they are done, and `hold` makes the optimizer wait for them.

    What lies on the CPU, as an optimizer's counters may beside moments on a GPU, is copied at once.
    """

    def __init__(self, arena: Arena, boxes: list[Box], changing: Collection[str] = ()) -> None:
        """`changing` names tensors that do not wait for `hold`: buffers, which the next forward may write to."""
        self._views = [slot_views(arena, index) for index in range(arena.slots)]
        self._lanes: dict[torch.device, Lane] = {}
        self.watch(boxes, changing)
        if self._lanes:
            slots = [torch.frombuffer(arena.slot(index), dtype=torch.uint8) for index in range(arena.slots)]
            pin(self, slots, list(self._lanes.values()))

    def watch(self, boxes: list[Box], changing: Collection[str] = ()) -> None:
        """Copy from these boxes from now on; they are laid out as those before, and on the same devices."""
        self.wait()
        self._sources = [box.local.detach() for box in boxes]
        self._changing = [box.name in changing for box in boxes]
        self._by_device = by_device(self._sources)
        for device in self._by_device:
            if device.type == GPU and device not in self._lanes:
                self._lanes[device] = Lane(device)

    def take(self, slot: int) -> None:
        """Copy the state as it is now into a slot. What lies on the CPU is there when this returns."""
        for device, indexes in self._by_device.items():
            views = [self._views[slot][index] for index in indexes]
            sources = [self._sources[index] for index in indexes]
            if lane := self._lanes.get(device):
                lane.copy(views, sources, [self._changing[index] for index in indexes])
            else:
                torch._foreach_copy_(views, sources)

    def settled(self) -> bool:
        return all(lane.settled() for lane in self._lanes.values())

    def wait(self) -> None:
        """Until the copy is complete."""
        for lane in self._lanes.values():
            lane.wait()

    def hold(self) -> None:
        """Order everything queued from now on, the optimizer's update first of all, behind the copy."""
        for lane in self._lanes.values():
            lane.hold()


def by_device(tensors: list[Tensor]) -> dict[torch.device, list[int]]:
    """Indexes of the tensors on each device, in their order."""
    found: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        found.setdefault(tensor.device, []).append(index)
    return found


def slot_views(arena: Arena, slot: int) -> list[Tensor]:
    """A slot's boxes as tensors over its memory."""
    raw = torch.frombuffer(arena.slot(slot), dtype=torch.uint8)
    views = []
    for place in arena.layout.places:
        dtype: torch.dtype = getattr(torch, place.dtype)
        views.append(raw[place.offset : place.offset + place.size_bytes].view(dtype).view(place.box_shape))
    return views
