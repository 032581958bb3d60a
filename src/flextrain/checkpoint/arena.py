"""Shared memory for snapshots: laid out once, touched once, mapped by trainer and writer alike. Torch-free.

Page faults, not copying, dominate staging (1.5 against 11.8 GB/s), so the block is allocated and touched at start-up
and never again. It is an anonymous memfd: whoever holds the descriptor keeps it alive, a killed trainer leaves it to
its writer, and when the last holder dies nothing is left behind. Behind the slots lies, for each, a label that says
which snapshot it holds, so that any process that maps the block knows what it has; a torn copy has none.
"""

import ctypes
import json
import mmap
import os
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from flextrain.errors import CheckpointError

ALIGN_BYTES = 64  # of a tensor in a slot
BLOCK_BYTES = 4096  # of a slot: O_DIRECT writes whole blocks from block-aligned memory
HUGE_PAGE_BYTES = 2 << 20
LABEL_BYTES = 1 << 20


@dataclass(frozen=True)
class Place:
    """Where one box of a tensor lies in a slot, and what it is: `size_bytes` from `offset` on."""

    name: str
    dtype: str
    start: tuple[int, ...]
    box_shape: tuple[int, ...]
    full_shape: tuple[int, ...]
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class Layout:
    """The places of a rank's boxes; `size_bytes` of data, the same for every snapshot of a run."""

    places: tuple[Place, ...]
    size_bytes: int

    @property
    def slot_bytes(self) -> int:
        return max(BLOCK_BYTES, padded(self.size_bytes, BLOCK_BYTES))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> "Layout":
        shapes = ("start", "box_shape", "full_shape")
        places = (Place(**{**p, **{key: tuple(p[key]) for key in shapes}}) for p in body["places"])
        return cls(tuple(places), body["size_bytes"])


class Arena:
    """`slots` snapshots of one layout, side by side in a block of shared memory, and a label for each."""

    def __init__(self, layout: Layout, slots: int, fd: int) -> None:
        """Map the block behind `fd`, which must be as long as `create` made it for this layout."""
        self.layout, self.slots, self.fd = layout, slots, fd
        self._closed = weakref.finalize(self, os.close, fd)  # an open descriptor keeps all the memory
        self._map = mmap.mmap(fd, _block_bytes(layout, slots))

    @classmethod
    def create(cls, layout: Layout, slots: int = 2) -> "Arena":
        """Allocate and touch a block. Raises OSError where the machine has not the memory for it."""
        fd = os.memfd_create("flextrain-arena")
        os.set_inheritable(fd, True)
        size_bytes = _block_bytes(layout, slots)
        os.posix_fallocate(fd, 0, size_bytes)
        arena = cls(layout, slots, fd)
        arena._map[:: mmap.PAGESIZE] = bytes(len(range(0, size_bytes, mmap.PAGESIZE)))
        return arena

    def slot(self, index: int) -> memoryview:
        """The bytes of one slot, writable, padding included."""
        start = index * self.layout.slot_bytes
        return memoryview(self._map)[start : start + self.layout.slot_bytes]

    def put_label(self, slot: int, body: dict[str, Any] | None) -> None:
        """Say what a slot holds, as JSON: None before it is written over, the truth once it is whole.

        Raises CheckpointError for a body of more than a MiB.
        """
        text = json.dumps(body).encode() if body is not None else b""
        if len(text) > LABEL_BYTES - 8:
            raise CheckpointError(
                f"the facts saved beside the tensors take {len(text)} bytes of JSON, more than {LABEL_BYTES - 8}",
                number=40,
                remedy="save large values as tensors",
            )
        label = self._label(slot)
        label[:8] = bytes(8)
        label[8 : 8 + len(text)] = text
        label[:8] = len(text).to_bytes(8, "little")  # last: whoever dies before this leaves no label

    def label(self, slot: int) -> dict[str, Any] | None:
        """What a slot holds; None where it holds nothing whole."""
        label = self._label(slot)
        length = int.from_bytes(label[:8], "little")
        body: dict[str, Any] | None = json.loads(bytes(label[8 : 8 + length])) if length else None
        return body

    def _label(self, slot: int) -> memoryview:
        start = self.slots * self.layout.slot_bytes + slot * LABEL_BYTES
        return memoryview(self._map)[start : start + LABEL_BYTES]

    def close(self) -> None:
        """Done by itself when nobody refers to this object any more; the map goes with its last view."""
        self._closed()


def _block_bytes(layout: Layout, slots: int) -> int:
    return slots * (layout.slot_bytes + LABEL_BYTES)


def huge_buffer(size_bytes: int) -> memoryview:
    """Memory of this process alone, in huge pages where the system gives them, aligned for O_DIRECT.

    A disk is read and written up to three times as fast from huge pages as from 4 KiB pages strewn over memory, which
    is what shared memory consists of; hence chunks pass through such a buffer, which costs a tenth of that.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # by default mmap shares, and shared memory gets no huge pages
    block = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=flags)
    with suppress(OSError):  # a kernel without huge pages
        block.madvise(mmap.MADV_HUGEPAGE)
    skip = -ctypes.addressof(ctypes.c_char.from_buffer(block)) % HUGE_PAGE_BYTES
    return memoryview(block)[skip : skip + size_bytes]


def padded(size_bytes: int, to: int) -> int:
    return -(-size_bytes // to) * to
