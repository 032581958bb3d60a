"""What each rank wrote, as it signs it off, and the one manifest that all of them make. Pure.

A thousand ranks hold shards of the same shapes at the same offsets, and differ in where those begin. A record says so
in two lines: what is the rank's own, then what it shares with others, which is parsed once for all that are equal.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from flextrain.checkpoint.arena import Layout, Place
from flextrain.checkpoint.manifest import Manifest, ObjectEntry, Run, TensorEntry

SPLIT = b',\n"kinds":'
Kind = tuple[str, str, tuple[int, ...], tuple[int, ...], int]
Found = tuple[str, str, tuple[int, ...], Run]  # tensor, dtype, full shape, shards


@dataclass(frozen=True)
class Part:
    """What one rank wrote: its object, if any; the tensors that lie whole in it, and of which it holds a shard.

    `whole` and `kinds`, which is JSON, have (tensor, dtype, full shape, shape here, offset) each. `starts` has where
    the shards begin, for each kind in turn the index in every dim that the shard does not span.
    """

    objects: dict[str, ObjectEntry] = field(default_factory=dict)
    whole: tuple[Kind, ...] = ()
    starts: tuple[int, ...] = ()
    kinds: bytes = b"[]"

    def to_json(self) -> bytes:
        objects = {name: vars(entry) for name, entry in self.objects.items()}
        head = _dump({"objects": objects, "whole": self.whole, "starts": self.starts})
        return head[:-1] + SPLIT + self.kinds + b"}"

    @classmethod
    def from_json(cls, text: bytes) -> "Part":
        """The inverse; raises ValueError, KeyError or TypeError for anything else."""
        head, _, kinds = text.partition(SPLIT)
        return cls._of(json.loads(head + b"}"), kinds[:-1])

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> "Part":
        """From the same JSON as part of another, parsed."""
        return cls._of(body, _dump(body["kinds"]))

    @classmethod
    def _of(cls, body: dict[str, Any], kinds: bytes) -> "Part":
        objects = {k: ObjectEntry(v["size_bytes"], tuple(v["chunks"])) for k, v in body["objects"].items()}
        return cls(objects, tuple(map(_kind, body["whole"])), tuple(body["starts"]), kinds)


def part_of(layout: Layout, name: str, entry: ObjectEntry) -> Part:
    """What a rank wrote whose whole snapshot became the object `name`."""
    whole = [place for place in layout.places if place.box_shape == place.full_shape]
    split = [place for place in layout.places if place.box_shape != place.full_shape]
    starts = [place.start[dim] for place in split for dim in _split_dims(place.full_shape, place.box_shape)]
    return Part({name: entry}, tuple(map(_kind_of, whole)), tuple(starts), _dump([_kind_of(place) for place in split]))


def merged(step: int, attempt: str, world_size: int, state: dict[str, Any], parts: Sequence[Part]) -> Manifest:
    """One manifest of what every rank wrote."""
    objects = {name: entry for part in parts for name, entry in part.objects.items()}
    tensors: dict[str, tuple[str, tuple[int, ...], list[Run]]] = {}
    for name, dtype, shape, run in _found([part for part in parts if part.objects]):
        tensors.setdefault(name, (dtype, shape, []))[2].append(run)
    entries = {name: TensorEntry(dtype, shape, tuple(runs)) for name, (dtype, shape, runs) in tensors.items()}
    return Manifest(step, attempt, world_size, state, entries, objects)


def _found(parts: Sequence[Part]) -> Iterator[Found]:
    alike: dict[bytes, list[int]] = {}
    for number, part in enumerate(parts):
        for name, dtype, shape, _, offset in part.whole:
            none = (0,) * len(shape)
            yield name, dtype, shape, Run(tuple(part.objects), offset, none, none, shape)
        alike.setdefault(part.kinds, []).append(number)
    for kinds, numbers in alike.items():
        for stretch in _stretches(numbers):
            yield from _shards(_kinds(kinds), [parts[number] for number in stretch])


def _shards(kinds: tuple[Kind, ...], parts: Sequence[Part]) -> Iterator[Found]:
    """The shards of parts that differ in `starts` alone."""
    objects = tuple(name for part in parts for name in part.objects)
    starts = np.array([part.starts for part in parts], np.int64).reshape(len(parts), -1)
    steps = np.diff(starts, axis=0)
    even = ((steps == steps[:1]) & (steps >= 0)).all(axis=0)  # of each column, and so for any number of parts
    column = 0
    for name, dtype, full, shape, offset in kinds:
        dims = _split_dims(full, shape)
        own = slice(column, column + len(dims))
        column += len(dims)
        for low, high in [(0, len(parts))] if even[own].all() else _even_stretches(steps[:, own]):
            start = _at(dims, starts[low, own], len(full))
            step = _at(dims, steps[low, own], len(full)) if high - low > 1 else (0,) * len(full)
            yield name, dtype, full, Run(objects[low:high], offset, start, step, shape)


def _even_stretches(steps: Any) -> Iterator[tuple[int, int]]:
    """Where rows go on by the same step, none of it backwards: (first row, one past the last), each as long as it can
    be. There is one row more than steps."""
    low = 0
    while low <= len(steps):
        high = low + 1
        if low < len(steps) and (steps[low] >= 0).all():
            same = (steps[low:] == steps[low]).all(axis=1)
            high += len(same) if same.all() else int(same.argmin())
        yield low, high
        low = high


def _stretches(numbers: list[int]) -> Iterator[list[int]]:
    """Cut rising numbers where they do not go on by the same step."""
    for low, high in _even_stretches(np.diff(np.array(numbers))[:, None]):
        yield numbers[low:high]


def _split_dims(full: tuple[int, ...], shape: tuple[int, ...]) -> list[int]:
    return [dim for dim, (whole, here) in enumerate(zip(full, shape, strict=True)) if whole != here]


def _at(dims: list[int], values: Any, count: int) -> tuple[int, ...]:
    """`values` at `dims` of so many, and elsewhere 0."""
    spread = dict(zip(dims, values.tolist(), strict=True))
    return tuple(spread.get(dim, 0) for dim in range(count))


def _kind_of(place: Place) -> Kind:
    return place.name, place.dtype, place.full_shape, place.box_shape, place.offset


def _kind(row: list[Any]) -> Kind:
    name, dtype, full, shape, offset = row
    return str(name), str(dtype), tuple(full), tuple(shape), int(offset)


@lru_cache(maxsize=64)
def _kinds(text: bytes) -> tuple[Kind, ...]:
    return tuple(map(_kind, json.loads(text)))


def _dump(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()
