"""Reads a checkpoint into the tensors of any world size and strategy, verifying every byte it uses.

Chunks are fetched and hashed piece by piece by a few threads, and go from there straight into the tensors they belong
to; memory beyond the destination is one piece per thread. A load takes from the page cache what lies there, as right
after a download, and the rest past it; `verify` asks the disk for everything.
"""

import ctypes
import errno
import mmap
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import nn

from flextrain.checkpoint.arena import BLOCK_BYTES, huge_buffer, padded
from flextrain.checkpoint.catalog import read_manifest
from flextrain.checkpoint.manifest import CHUNK_BYTES, ITEM_BYTES, Manifest, ObjectEntry, Shard, TensorEntry
from flextrain.checkpoint.persist import open_direct
from flextrain.checkpoint.shards import Box, State, local_boxes, model_state
from flextrain.errors import CheckpointCorrupt, CheckpointMismatch, StorageError
from flextrain.storage import Store, open_store

NAMES_SHOWN = 3
THREADS = 8
PIECE_BYTES = 4 << 20  # read at once from a file: fits the processor's cache, where it is hashed and copied
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
        self._own = threading.local()

    def check(self) -> None:
        self._run(range(len(self._entry.chunks)), lambda begin, piece: None, cached=False)

    def scatter(self, targets: list[Target]) -> None:
        """Fill `targets`, in order of `start`, from the chunks that hold them. Where it raises, they hold anything."""
        parts: dict[int, list[Target]] = defaultdict(list)
        for target in targets:
            last = (target.start + len(target.into) - 1) // CHUNK_BYTES
            for index in range(target.start // CHUNK_BYTES, last + 1):
                parts[index].append(target)

        def place(begin: int, piece: Bytes) -> None:
            for target in parts[begin // CHUNK_BYTES]:
                low, high = max(begin, target.start), min(begin + len(piece), target.start + len(target.into))
                if low < high:
                    np.copyto(target.into[low - target.start : high - target.start], piece[low - begin : high - begin])

        self._run(sorted(parts), place, cached=True)

    def _run(self, indexes: Iterable[int], use: Callable[[int, Bytes], None], *, cached: bool) -> None:
        """Give every piece of the chunks named and the byte it begins at to `use`, before its chunk is verified."""
        with ExitStack() as files, ThreadPoolExecutor(THREADS) as pool:
            if self._path:
                self._direct = self._open(files, self._path, open_direct)
                self._through_cache = self._open(files, self._path, os.open)
                self._resident = _pages_in_memory(self._through_cache) if cached else np.zeros(1, np.bool_)
            for _ in pool.map(lambda index: self._fetch(index, use), indexes):
                pass

    def _open(self, files: ExitStack, path: Path, how: Callable[[Path, int], int]) -> int:
        try:
            fd = how(path, os.O_RDONLY)
        except OSError as error:
            raise self._unreadable(error) from error
        files.callback(os.close, fd)
        return fd

    def _fetch(self, index: int, use: Callable[[int, Bytes], None]) -> None:
        start = index * CHUNK_BYTES
        stop = min(start + CHUNK_BYTES, self._entry.size_bytes)
        step, read = (PIECE_BYTES, self._read) if self._path else (CHUNK_BYTES, self._get)
        digest = xxhash.xxh3_64()
        for low in range(start, stop, step):
            try:
                piece = read(low, min(step, stop - low))
            except StorageError as error:
                if self._folder.size(self._name) == self._entry.size_bytes:
                    raise  # the store ails, not the object
                raise self._corrupt(f"cannot be read at byte {low} ({error.text})") from error
            except OSError as error:
                raise self._unreadable(error) from error
            digest.update(piece.data)
            use(low, piece)
        if digest.hexdigest() != self._entry.chunks[index]:
            raise self._corrupt(f"differs from its hash between bytes {start} and {stop}")

    def _read(self, start: int, length: int) -> Bytes:
        """A piece of the file, shorter where the file ends; valid until this thread reads the next."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = huge_buffer(PIECE_BYTES)
        view, done = self._own.buffer[: padded(length, BLOCK_BYTES)], 0
        in_memory = self._resident[start // mmap.PAGESIZE : padded(start + length, mmap.PAGESIZE) // mmap.PAGESIZE]
        fd = self._through_cache if len(in_memory) and in_memory.all() else self._direct
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


def _pages_in_memory(fd: int) -> NDArray[np.bool_]:
    """For every page of a file whether the page cache holds it. None where the system does not tell.

    Reading with RWF_NOWAIT would not do: it has the kernel fetch what it then says is not there.
    """
    size_bytes = os.fstat(fd).st_size
    pages = np.zeros(padded(size_bytes, mmap.PAGESIZE) // mmap.PAGESIZE, np.uint8)
    if size_bytes:
        mapped = np.frombuffer(mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ), np.uint8)
        addresses = [ctypes.c_void_p(array.ctypes.data) for array in (mapped, pages)]
        ctypes.CDLL(None).mincore(addresses[0], ctypes.c_size_t(size_bytes), addresses[1])
    return (pages & 1).astype(np.bool_)
