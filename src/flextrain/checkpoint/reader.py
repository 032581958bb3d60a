"""Reads a checkpoint into the tensors of any world size and strategy, verifying every byte it uses.

Chunks are fetched and checked by a few threads, and go from there straight into the tensors they belong to; memory
beyond the destination is one chunk per thread.
"""

import errno
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import nn

from flextrain.checkpoint.arena import huge_buffer
from flextrain.checkpoint.catalog import read_manifest
from flextrain.checkpoint.manifest import CHUNK_BYTES, ITEM_BYTES, Manifest, ObjectEntry, Shard, TensorEntry
from flextrain.checkpoint.persist import open_direct
from flextrain.checkpoint.shards import Box, State, local_boxes, model_state
from flextrain.errors import CheckpointCorrupt, CheckpointMismatch, StorageError
from flextrain.storage import Store, open_store

NAMES_SHOWN = 3
THREADS = 4
Bytes = NDArray[np.uint8]


def load_weights(url: str, model: nn.Module) -> dict[str, object]:
    """Load the weights of the checkpoint at `url` into a model, in this process alone; returns the manifest's `state`.

    Raises CheckpointError where nothing was committed there, CheckpointCorrupt for a bad byte, and CheckpointMismatch
    where names, shapes or dtypes of the model differ from those saved.
    """
    folder = open_store(url)
    manifest = read_manifest(folder)
    read_into(folder, manifest, model_state(model), prefix="model.")
    return manifest.state


def read_into(folder: Store, manifest: Manifest, state: State, *, prefix: str = "") -> None:
    """Fill `state`'s tensors in place from a checkpoint; entries of the manifest outside `prefix` are ignored."""
    saved = {name: entry for name, entry in manifest.tensors.items() if name.startswith(prefix)}
    check_fits(saved, state, folder.url)
    read_boxes(folder, manifest, local_boxes(state))


def read_boxes(folder: Store, manifest: Manifest, boxes: Iterable[Box]) -> None:
    """Fill boxes, of the dtype they were saved in, from whatever saved shards they overlap."""
    wanted: dict[str, list[Target]] = defaultdict(list)
    for box in boxes:
        for shard in manifest.tensors[box.name].shards:
            if all(low < high for low, high in _bounds(shard, box)):
                wanted[shard.object].append(_target(shard, box))
    for name, targets in sorted(wanted.items()):
        chunks = Chunks(folder, name, manifest.objects[name])
        chunks.scatter(sorted(targets, key=lambda target: target.start))
        for target in targets:
            target.finish()


def check_fits(saved: dict[str, TensorEntry], state: State, where: str) -> None:
    """Raises CheckpointMismatch, naming the first differences, unless both hold the same tensors."""
    problems = [f"{name} is not in the checkpoint" for name in state if name not in saved]
    problems += [f"{name} is only in the checkpoint" for name in saved if name not in state]
    for name in state.keys() & saved.keys():
        entry, tensor = saved[name], state[name]
        if entry.shape != tuple(tensor.shape):
            problems.append(f"{name} is {list(entry.shape)} in the checkpoint and {list(tensor.shape)} here")
        elif entry.dtype != str(tensor.dtype).removeprefix("torch."):
            problems.append(f"{name} is {entry.dtype} in the checkpoint and {tensor.dtype} here")
    if problems:
        problems.sort()
        more = f" (and {len(problems) - NAMES_SHOWN} more)" if len(problems) > NAMES_SHOWN else ""
        raise CheckpointMismatch(
            f"{where} is a checkpoint of another model or optimizer: {'; '.join(problems[:NAMES_SHOWN])}{more}",
            number=5,
            remedy="restore the model settings it was saved with, or start afresh under another main.experiment_name",
        )


def verify(folder: Store, manifest: Manifest) -> None:
    """Read every byte of a checkpoint; raises CheckpointCorrupt at the first that differs."""
    for name, entry in manifest.objects.items():
        Chunks(folder, name, entry).check()


@dataclass(frozen=True)
class Target:
    """Where bytes [start, start + len(into)) of an object go; `finish` puts them in place if `into` is no tensor."""

    start: int
    into: Bytes
    finish: Callable[[], object]


def _target(shard: Shard, box: Box) -> Target:
    """The rows of a saved shard that overlap a box: read straight into the tensor where they are whole rows of it."""
    bounds = list(_bounds(shard, box))
    row_bytes = prod(shard.shape[1:]) * ITEM_BYTES[str(box.local.dtype).removeprefix("torch.")]
    low, high = (bounds[0][0] - shard.start[0], bounds[0][1] - shard.start[0]) if bounds else (0, 1)
    start = shard.offset + low * row_bytes
    whole_rows = box.local.shape[1:] == shard.shape[1:]
    if whole_rows and box.local.device.type == "cpu" and box.local.is_contiguous():
        first = (bounds[0][0] - box.start[0]) * row_bytes if bounds else 0
        raw = box.local.detach().reshape(-1).view(torch.uint8).numpy()
        return Target(start, raw[first : first + (high - low) * row_bytes], lambda: None)
    into = np.empty((high - low) * row_bytes, dtype=np.uint8)

    def finish() -> None:
        rows = torch.from_numpy(into).view(box.local.dtype).reshape((high - low, *shard.shape[1:]) if bounds else ())
        inner = [slice(a - s, b - s) for (a, b), s in zip(bounds[1:], shard.start[1:], strict=True)]
        there = [slice(a - s, b - s) for (a, b), s in zip(bounds, box.start, strict=True)]
        box.local[tuple(there)].copy_(rows[(slice(None), *inner)] if bounds else rows)

    return Target(start, into, finish)


def _bounds(shard: Shard, box: Box) -> Iterable[tuple[int, int]]:
    for s, n, b, m in zip(shard.start, shard.shape, box.start, box.local.shape, strict=True):
        yield max(s, b), min(s + n, b + m)


class Chunks:
    """The chunks of one object, fetched and verified by THREADS threads."""

    def __init__(self, folder: Store, name: str, entry: ObjectEntry) -> None:
        self._folder, self._name, self._entry = folder, name, entry
        self._url = folder.url_of(name)
        self._path = folder.local_root / name if folder.local_root else None
        self._buffers = threading.local()

    def check(self) -> None:
        self._run(range(len(self._entry.chunks)), lambda index, chunk: None)

    def scatter(self, targets: list[Target]) -> None:
        """Fill `targets`, in order of `start`, from the chunks that hold them."""
        parts: dict[int, list[Target]] = defaultdict(list)
        for target in targets:
            last = (target.start + len(target.into) - 1) // CHUNK_BYTES
            for index in range(target.start // CHUNK_BYTES, last + 1):
                parts[index].append(target)

        def place(index: int, chunk: Bytes) -> None:
            begin = index * CHUNK_BYTES
            for target in parts[index]:
                low, high = max(begin, target.start), min(begin + len(chunk), target.start + len(target.into))
                np.copyto(target.into[low - target.start : high - target.start], chunk[low - begin : high - begin])

        self._run(sorted(parts), place)

    def _run(self, indexes: Iterable[int], use: Callable[[int, Bytes], None]) -> None:
        fd = self._open()
        try:
            with ThreadPoolExecutor(THREADS) as pool:
                for _ in pool.map(lambda index: use(index, self._fetch(fd, index)), indexes):
                    pass
        finally:
            if fd is not None:
                os.close(fd)

    def _open(self) -> int | None:
        try:
            return open_direct(self._path, os.O_RDONLY) if self._path else None
        except OSError as error:
            raise self._unreadable(error) from error

    def _fetch(self, fd: int | None, index: int) -> Bytes:
        """A chunk, verified; valid until this thread fetches the next."""
        start = index * CHUNK_BYTES
        length = min(CHUNK_BYTES, self._entry.size_bytes - start)
        try:
            chunk = self._read(fd, start, length) if fd is not None else self._get(start, length)
        except StorageError as error:
            if self._folder.size(self._name) == self._entry.size_bytes:
                raise  # the store ails, not the object
            raise self._corrupt(f"cannot be read at byte {start} ({error.text})") from error
        except OSError as error:
            raise self._unreadable(error) from error
        if len(chunk) != length or xxhash.xxh3_64_hexdigest(chunk.data) != self._entry.chunks[index]:
            raise self._corrupt(f"differs from its hash between bytes {start} and {start + length}")
        return chunk

    def _read(self, fd: int, start: int, length: int) -> Bytes:
        if not hasattr(self._buffers, "chunk"):
            self._buffers.chunk = huge_buffer(CHUNK_BYTES)
        view, done = self._buffers.chunk, 0
        while done < length and (count := os.preadv(fd, [view[done:]], start + done)):
            done += count
        return np.frombuffer(view, np.uint8)[: min(done, length)]

    def _get(self, start: int, length: int) -> Bytes:
        return np.frombuffer(self._folder.get_range(self._name, start, length), np.uint8)

    def _unreadable(self, error: OSError) -> CheckpointCorrupt | StorageError:
        """A file that is gone or lies on a bad block is lost; where memory, descriptors or rights lack, it is not."""
        if error.errno in (errno.ENOENT, errno.EIO):
            return self._corrupt(f"cannot be read ({error.strerror})")
        return StorageError(f"{self._url}: {error.strerror}", number=4, remedy="check the path and the permissions")

    def _corrupt(self, what: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(
            f"{self._url} {what}", number=6, remedy="an older checkpoint is used where there is one"
        )
