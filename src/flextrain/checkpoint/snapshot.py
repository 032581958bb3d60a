"""Torch's side of the arena: the layout of a state, and the one batched copy that takes a snapshot."""

import torch
from torch import Tensor

from flextrain.checkpoint.arena import ALIGN_BYTES, Arena, Layout, Place, padded
from flextrain.checkpoint.shards import Box


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
    """Copies of one set of boxes in an arena's slots. On CUDA the copy runs on a stream of its own, beside the next
    forward and backward; `settled` says when it is done, and `hold` makes the optimizer wait for it."""

    def __init__(self, arena: Arena, boxes: list[Box]) -> None:
        self._sources = [box.local.detach() for box in boxes]
        self._views = [slot_views(arena, index) for index in range(arena.slots)]
        self._cuda = bool(self._sources) and self._sources[0].is_cuda
        self._stream = torch.cuda.Stream() if self._cuda else None
        self._done: torch.cuda.Event | None = None
        if self._cuda:
            for index in range(arena.slots):
                raw = torch.frombuffer(arena.slot(index), dtype=torch.uint8)
                torch.cuda.cudart().cudaHostRegister(raw.data_ptr(), raw.nbytes, 0)

    def watch(self, boxes: list[Box]) -> None:
        """Copy from these boxes from now on; they are laid out as those before."""
        self._sources = [box.local.detach() for box in boxes]

    def take(self, slot: int) -> None:
        """Copy the state as it is now into a slot. On the CPU it is there when this returns."""
        if self._stream is None:
            if self._sources:
                torch._foreach_copy_(self._views[slot], self._sources)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(self._views[slot], self._sources, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def settled(self) -> bool:
        return self._done is None or self._done.query()

    def wait(self) -> None:
        """Until the copy is complete."""
        if self._done is not None:
            self._done.synchronize()

    def hold(self) -> None:
        """Order everything queued from now on, the optimizer's update first of all, behind the copy."""
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)

    def restore(self, slot: int) -> None:
        """Copy a slot back into the state it was taken from."""
        if self._sources:
            torch._foreach_copy_(self._sources, self._views[slot])


def slot_views(arena: Arena, slot: int) -> list[Tensor]:
    """A slot's boxes as tensors over its memory."""
    raw = torch.frombuffer(arena.slot(slot), dtype=torch.uint8)
    views = []
    for place in arena.layout.places:
        dtype: torch.dtype = getattr(torch, place.dtype)
        views.append(raw[place.offset : place.offset + place.size_bytes].view(dtype).view(place.box_shape))
    return views
