"""Reads a checkpoint into the tensors of any world size and strategy, verifying every byte it uses.

Chunks are fetched and hashed piece by piece by a few threads, and go from there straight into the tensors they belong
to; memory beyond the destination is one piece per thread. A load takes from the page cache what lies there, as right
after a download, and the rest past it; `verify` asks the disk for everything.

A checkpoint may lie in several places, as on a node's own disk and in a store: folders of one step, nearest first.
Every chunk comes from the first of them that has it sound.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from math import prod

import torch
from torch import nn

from flextrain.checkpoint.catalog import read_manifest
from flextrain.checkpoint.chunks import Chunks, Parts, Places, Target, in_order
from flextrain.checkpoint.manifest import ITEM_BYTES, Manifest, Shard, TensorEntry
from flextrain.checkpoint.shards import Box, State, local_boxes, model_state
from flextrain.checkpoint.sources import Bytes
from flextrain.errors import CheckpointMismatch
from flextrain.storage import open_store

NAMES_SHOWN = 3
BLOCK_BYTES = 4 << 20  # of rows that cannot be read straight into their tensor


def load_weights(url: str, model: nn.Module) -> dict[str, object]:
    """Load the weights of the checkpoint at `url` into a model, in this process alone; returns the manifest's `state`.

    Raises CheckpointError where nothing was committed there, CheckpointCorrupt for a bad byte, and CheckpointMismatch
    where names, shapes or dtypes of the model differ from those saved.
    """
    folder = open_store(url)
    manifest = read_manifest(folder)
    read_into(folder, manifest, model_state(model), prefix="model.")
    return manifest.state


def read_into(places: Places, manifest: Manifest, state: State, *, prefix: str = "") -> None:
    """Fill `state`'s tensors in place from a checkpoint; entries of the manifest outside `prefix` are ignored.

    Raises CheckpointMismatch where names, shapes or dtypes differ, CheckpointCorrupt where no place has a chunk sound,
    and StorageError where one that may have it ails.
    """
    saved = {name: entry for name, entry in manifest.tensors.items() if name.startswith(prefix)}
    check_fits(saved, state, in_order(places)[-1].url)
    read_boxes(places, manifest, local_boxes(state))


def read_boxes(places: Places, manifest: Manifest, boxes: Iterable[Box]) -> None:
    """Fill boxes, of the dtype they were saved in, from whatever saved shards they overlap."""
    for name, parts in parts_of(manifest, boxes).items():
        with Chunks(places, name, manifest.objects[name]) as chunks:
            chunks.scatter(parts, list(parts))


def parts_of(manifest: Manifest, boxes: Iterable[Box]) -> dict[str, Parts]:
    """What boxes need of each object, by the object's name."""
    wanted: dict[str, list[Target]] = defaultdict(list)
    for box in boxes:
        for shard in manifest.tensors[box.name].touching(box.start, tuple(box.local.shape)):
            if all(low < high for low, high in _bounds(shard, box)):
                wanted[shard.object] += _targets(shard, box)
    return {name: Parts(targets) for name, targets in sorted(wanted.items())}


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


def verify(places: Places, manifest: Manifest) -> None:
    """Read every byte of a checkpoint; raises CheckpointCorrupt at the first that no place has sound."""
    for name, entry in manifest.objects.items():
        with Chunks(places, name, entry, cached=False) as chunks:
            chunks.check()


def _targets(shard: Shard, box: Box) -> Iterator[Target]:
    """The rows of a saved shard that overlap a box: read straight into the tensor where they are whole rows of it, and
    else a block of rows at a time."""
    bounds = list(_bounds(shard, box)) or [(0, 1)]
    first, begin = (shard.start[0], box.start[0]) if shard.start else (0, 0)
    row_bytes = prod(shard.shape[1:]) * ITEM_BYTES[str(box.local.dtype).removeprefix("torch.")]
    low, high = bounds[0]
    if box.local.shape[1:] == shard.shape[1:] and box.local.device.type == "cpu" and box.local.is_contiguous():
        raw = box.local.detach().reshape(-1).view(torch.uint8).numpy()
        into = raw[(low - begin) * row_bytes : (high - begin) * row_bytes]
        yield Target(shard.offset + (low - first) * row_bytes, len(into), into)
        return
    step = max(1, BLOCK_BYTES // row_bytes)
    for at in range(low, high, step):
        rows = (at, min(at + step, high))
        size_bytes = (rows[1] - rows[0]) * row_bytes
        finish = partial(_put_rows, shard, box, [rows, *bounds[1:]])
        yield Target(shard.offset + (at - first) * row_bytes, size_bytes, finish=finish)


def _put_rows(shard: Shard, box: Box, bounds: list[tuple[int, int]], raw: Bytes) -> None:
    """Copy what lies within `bounds` of whole rows of a shard to a box."""
    rows = torch.from_numpy(raw).view(box.local.dtype)
    if not shard.shape:
        box.local.copy_(rows.reshape(()))
        return
    rows = rows.reshape(-1, *shard.shape[1:])
    inner = [slice(a - s, b - s) for (a, b), s in zip(bounds[1:], shard.start[1:], strict=True)]
    there = [slice(a - s, b - s) for (a, b), s in zip(bounds, box.start, strict=True)]
    box.local[tuple(there)].copy_(rows[(slice(None), *inner)])


def _bounds(shard: Shard, box: Box) -> Iterable[tuple[int, int]]:
    for s, n, b, m in zip(shard.start, shard.shape, box.start, box.local.shape, strict=True):
        yield max(s, b), min(s + n, b + m)
