"""Reads a checkpoint into the tensors of any world size and strategy, verifying every byte it uses."""

from collections import defaultdict
from collections.abc import Iterable
from math import prod

import torch
import xxhash
from torch import Tensor, nn

from flextrain.checkpoint.catalog import read_manifest
from flextrain.checkpoint.manifest import CHUNK_BYTES, ITEM_BYTES, Manifest, Shard, TensorEntry
from flextrain.checkpoint.shards import Box, State, local_boxes, model_state
from flextrain.errors import CheckpointCorrupt, CheckpointMismatch, StorageError
from flextrain.storage import Store, open_store

NAMES_SHOWN = 3
GONE = (2, 3)  # numbers of the StorageErrors that say an object is missing or too short


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
    wanted: dict[str, list[tuple[Shard, Box]]] = defaultdict(list)
    for box in local_boxes(state):
        for shard in saved[box.name].shards:
            if _overlap(shard, box):
                wanted[shard.object].append((shard, box))
    for name, pairs in sorted(wanted.items()):
        chunks = ChunkReader(folder, name, manifest)
        for shard, box in sorted(pairs, key=lambda pair: pair[0].offset):
            _copy(chunks, shard, box)


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


class ChunkReader:
    """Byte ranges of one object; each chunk is fetched and verified once while ranges ascend, and one is kept."""

    def __init__(self, folder: Store, name: str, manifest: Manifest) -> None:
        self._folder, self._name, self._entry = folder, name, manifest.objects[name]
        self._index, self._chunk = -1, memoryview(b"")

    def read(self, start: int, size_bytes: int) -> bytearray:
        out = bytearray(size_bytes)
        done = 0
        while done < size_bytes:
            index, begin = divmod(start + done, CHUNK_BYTES)
            piece = self._fetch(index)[begin : begin + size_bytes - done]
            out[done : done + len(piece)] = piece
            done += len(piece)
        return out

    def _fetch(self, index: int) -> memoryview:
        if index != self._index:
            start = index * CHUNK_BYTES
            length = min(CHUNK_BYTES, self._entry.size_bytes - start)
            try:
                chunk = self._folder.get_range(self._name, start, length)
            except StorageError as error:
                if error.number not in GONE:  # refused or out of reach: that says nothing about the bytes
                    raise
                raise self._corrupt(f"cannot be read at byte {start} ({error.text})") from error
            if xxhash.xxh3_64_hexdigest(chunk) != self._entry.chunks[index]:
                raise self._corrupt(f"differs from its hash between bytes {start} and {start + length}")
            self._index, self._chunk = index, chunk
        return self._chunk

    def _corrupt(self, what: str) -> CheckpointCorrupt:
        where = self._folder.url_of(self._name)
        return CheckpointCorrupt(f"{where} {what}", number=6, remedy="an older checkpoint is used where there is one")


def verify(folder: Store, manifest: Manifest) -> None:
    """Read every byte of a checkpoint; raises CheckpointCorrupt at the first that differs."""
    for name, entry in manifest.objects.items():
        reader = ChunkReader(folder, name, manifest)
        for index in range(len(entry.chunks)):
            reader._fetch(index)


def _overlap(shard: Shard, box: Box) -> bool:
    return all(low < high for low, high in _bounds(shard, box))


def _bounds(shard: Shard, box: Box) -> Iterable[tuple[int, int]]:
    for s, n, b, m in zip(shard.start, shard.shape, box.start, box.local.shape, strict=True):
        yield max(s, b), min(s + n, b + m)


def _copy(chunks: ChunkReader, shard: Shard, box: Box) -> None:
    """Copy the part of a saved shard that lies in `box`; only the rows of the shard that overlap are read."""
    bounds = list(_bounds(shard, box))
    dtype = box.local.dtype
    row_bytes = prod(shard.shape[1:]) * ITEM_BYTES[str(dtype).removeprefix("torch.")]
    low, high = (bounds[0][0] - shard.start[0], bounds[0][1] - shard.start[0]) if bounds else (0, 1)
    raw = chunks.read(shard.offset + low * row_bytes, (high - low) * row_bytes)
    rows: Tensor = torch.frombuffer(raw, dtype=dtype).reshape((high - low, *shard.shape[1:]) if bounds else ())
    if bounds:
        inner = [slice(a - s, b - s) for (a, b), s in zip(bounds[1:], shard.start[1:], strict=True)]
        target = [slice(a - s, b - s) for (a, b), s in zip(bounds, box.start, strict=True)]
        box.local[tuple(target)].copy_(rows[(slice(None), *inner)])
    else:
        box.local.copy_(rows)
