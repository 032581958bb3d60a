"""Writes one rank's part of a checkpoint: one object of raw bytes, hashed chunk by chunk on the way out."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from flextrain.checkpoint.manifest import CHUNK_BYTES, ObjectEntry, Shard
from flextrain.checkpoint.shards import Box
from flextrain.storage import Store

ALIGN_BYTES = 64


@dataclass(frozen=True)
class Written:
    """What a rank reports after writing: its shards as (tensor name, dtype, full shape, shard), and its object."""

    shards: list[tuple[str, str, tuple[int, ...], Shard]]
    objects: dict[str, ObjectEntry]


def write_boxes(folder: Store, attempt: str, rank: int, boxes: list[Box]) -> Written:
    """Write `boxes` as `<attempt>/rank-<rank>.bin` below a step's folder. Raises StorageError.

    Memory beyond the state itself stays at a few chunks. A rank without boxes writes nothing.
    """
    name = f"{attempt}/rank-{rank:05d}.bin"
    shards, offset = [], 0
    for box in boxes:
        dtype = str(box.local.dtype).removeprefix("torch.")
        shards.append((box.name, dtype, box.shape, Shard(name, offset, box.start, tuple(box.local.shape))))
        offset += _padded(box.local.nbytes)
    if not boxes:
        return Written([], {})
    hashes: list[str] = []
    folder.put_stream(name, _hashed_chunks(boxes, hashes))
    return Written(shards, {name: ObjectEntry(offset, tuple(hashes))})


def _hashed_chunks(boxes: list[Box], hashes: list[str]) -> Iterator[bytes]:
    pending = bytearray()
    for piece in _pieces(boxes):
        pending += piece
        if len(pending) == CHUNK_BYTES:
            hashes.append(xxhash.xxh3_64_hexdigest(pending))
            yield bytes(pending)
            pending.clear()
    if pending:
        hashes.append(xxhash.xxh3_64_hexdigest(pending))
        yield bytes(pending)


def _pieces(boxes: list[Box]) -> Iterator[memoryview | bytes]:
    """The bytes of all boxes with their padding, cut so that pieces end exactly at chunk borders."""
    position = 0
    for box in boxes:
        view = memoryview(as_bytes(box.local).numpy().data)
        start = 0
        while start < len(view):
            stop = min(len(view), start + CHUNK_BYTES - position % CHUNK_BYTES)
            yield view[start:stop]
            position += stop - start
            start = stop
        padding = _padded(len(view)) - len(view)
        yield bytes(padding)  # never crosses a chunk border: both are multiples of ALIGN_BYTES
        position += padding


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's bytes as uint8 (n,) on the CPU; shares memory where it can."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
