"""The manifest of a checkpoint: what it holds, where each byte lies, the hash of every chunk. JSON, never pickle.

Its last field, the seal, is a hash of all that stands before it: a flipped bit that leaves JSON behind is found too.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import xxhash

from flextrain.checkpoint.tiling import MAX_DIMS, Tiling
from flextrain.errors import CheckpointCorrupt

FORMAT = "flextrain-checkpoint"
SCHEMA_VERSION = 3
SEAL = b',"seal":"'
CHUNK_BYTES = 16 << 20
MAX_ITEMS = (1 << 63) // 16 - 1  # of a tensor, of which each has up to 16 bytes
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
}
OBJECT_NAME = re.compile(r"[A-Za-z0-9-]+/rank-\d{5,}\.bin")  # never leads outside the step's folder


@dataclass(frozen=True)
class Shard:
    """A box of a tensor: it begins at index `start`, spans `shape`, and lies in `object` from byte `offset` on."""

    object: str
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """Shards of one shape: at `offset` in each of `objects`, and each `step` further on in the tensor than the last.

    A thousand ranks that hold equal parts of a tensor make one. Alone, `step` is all zeros.
    """

    objects: tuple[str, ...]
    offset: int
    start: tuple[int, ...]
    step: tuple[int, ...]
    shape: tuple[int, ...]

    def shards(self, indexes: Iterable[int] | None = None) -> Iterator[Shard]:
        """All of them, or some."""
        for index in range(len(self.objects)) if indexes is None else indexes:
            start = tuple(at + index * by for at, by in zip(self.start, self.step, strict=True))
            yield Shard(self.objects[index], self.offset, start, self.shape)

    def touching(self, start: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[Shard]:
        """Those that may have something in common with the box at `start`."""
        low, high = 0, len(self.objects)
        for at, by, size, begin, length in zip(self.start, self.step, self.shape, start, shape, strict=True):
            if by:  # at + i * by + size > begin, and at + i * by < begin + length
                low = max(low, (begin - at - size) // by + 1)
                high = min(high, -((at - begin - length) // by))
        return self.shards(range(low, high))

    def boxes(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """What they cover as (start, shape): one box where each begins where the last ends."""
        moving = [dim for dim, by in enumerate(self.step) if by]
        if len(moving) == 1 and self.step[moving[0]] == self.shape[moving[0]]:
            dim = moving[0]
            yield self.start, (*self.shape[:dim], self.shape[dim] * len(self.objects), *self.shape[dim + 1 :])
        else:
            yield from ((shard.start, shard.shape) for shard in self.shards())


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the whole model: its dtype, full shape, and the shards that tile it, in runs."""

    dtype: str
    shape: tuple[int, ...]
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, dtype: str, shape: tuple[int, ...], shards: Iterable[Shard]) -> "TensorEntry":
        """Every shard a run of its own."""
        none = (0,) * len(shape)
        return cls(dtype, shape, tuple(Run((s.object,), s.offset, s.start, none, s.shape) for s in shards))

    @property
    def shard_count(self) -> int:
        return sum(len(run.objects) for run in self.runs)

    @property
    def shards(self) -> Iterator[Shard]:
        """One after the other; there may be a great many."""
        return (shard for run in self.runs for shard in run.shards())

    def touching(self, start: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[Shard]:
        """Shards that may have something in common with the box at `start`; not all of the others are left out."""
        return (shard for run in self.runs for shard in run.touching(start, shape))


@dataclass(frozen=True)
class ObjectEntry:
    """An object below the step: its size and the xxh3-64 of each CHUNK_BYTES of it, as hex."""

    size_bytes: int
    chunks: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """One committed checkpoint. `state` holds the small facts: step, position in the data order, seeds, config."""

    step: int
    attempt: str
    world_size: int
    state: dict[str, Any]
    tensors: dict[str, TensorEntry]
    objects: dict[str, ObjectEntry] = field(default_factory=dict)

    def to_json(self) -> bytes:
        table = Table(self.objects)
        body = {
            "format": FORMAT,
            "schema_version": SCHEMA_VERSION,
            "step": self.step,
            "attempt": self.attempt,
            "world_size": self.world_size,
            "state": self.state,
            "tensors": {
                name: {"dtype": t.dtype, "shape": t.shape, "shards": [table.row(run) for run in t.runs]}
                for name, t in self.tensors.items()
            },
            "objects": {name: vars(entry) for name, entry in self.objects.items()},
        }
        return sealed(json.dumps(body, separators=(",", ":")).encode())

    @property
    def digest(self) -> str:
        """sha256 of the manifest, and so of everything it hashes."""
        return hashlib.sha256(self.to_json()).hexdigest()

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.objects.values())

    @classmethod
    def from_json(cls, text: bytes, where: str) -> "Manifest":
        """Parse and check a manifest read from `where`; raises CheckpointCorrupt for anything it cannot vouch for."""
        try:
            body = json.loads(unsealed(text))
            found = (body.get("format"), body.get("schema_version"))
            if found != (FORMAT, SCHEMA_VERSION):
                raise ValueError(f"format and version are {found}, expected {(FORMAT, SCHEMA_VERSION)}")
            objects = {n: ObjectEntry(int(o["size_bytes"]), tuple(o["chunks"])) for n, o in body["objects"].items()}
            table, tiling = Table(objects), Tiling()
            return cls(
                step=int(body["step"]),
                attempt=str(body["attempt"]),
                world_size=int(body["world_size"]),
                state=dict(body["state"]),
                tensors={name: _tensor(name, entry, table, tiling) for name, entry in body["tensors"].items()},
                objects=objects,
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise CheckpointCorrupt(
                f"{where}: not a sound manifest ({error})",
                number=1,
                remedy="an older checkpoint is used where there is one",
            ) from error


class Table:
    """The objects of a manifest by number, and what is left of each once shards have claimed their bytes."""

    def __init__(self, objects: Mapping[str, ObjectEntry]) -> None:
        """Raises ValueError for objects that no save has written."""
        for name, entry in objects.items():
            if not OBJECT_NAME.fullmatch(name):
                raise ValueError(f"object name {name!r} leads elsewhere")
            if len(entry.chunks) != -(-entry.size_bytes // CHUNK_BYTES):
                raise ValueError(f"{name} has {len(entry.chunks)} chunk hashes for {entry.size_bytes} bytes")
        self._names = tuple(objects)
        self._numbers = {name: number for number, name in enumerate(objects)}
        self._sizes = np.array([entry.size_bytes for entry in objects.values()], np.int64)
        self._left = self._sizes.copy()
        self._known: dict[tuple[int, int, int], tuple[str, ...]] = {}

    def row(self, run: Run) -> dict[str, Any]:
        """A run as JSON: its objects by number, the first of `count` that are `every` apart."""
        first, last, count = self._numbers[run.objects[0]], self._numbers[run.objects[-1]], len(run.objects)
        row = {"object": first, "offset": run.offset, "start": run.start, "shape": run.shape}
        return row | {"count": count, "every": (last - first) // (count - 1), "step": run.step} if count > 1 else row

    def run(self, row: dict[str, Any], item_bytes: int) -> Run:
        """The inverse, which claims the run's bytes. Raises ValueError where its objects have not so many."""
        start, shape = tuple(map(int, row["start"])), tuple(map(int, row["shape"]))
        first, offset, count, every = int(row["object"]), int(row["offset"]), int(row.get("count", 1)), 1
        step = (0,) * len(start)
        if count > 1:
            every, step = int(row["every"]), tuple(map(int, row["step"]))
        if not len(start) == len(shape) == len(step) or min((*shape, *step), default=0) < 0:
            raise ValueError(f"a shard has the shape {list(shape[:MAX_DIMS])}, start and step do not go with it")
        size_bytes = prod(shape) * item_bytes
        if first < 0 or count < 1 or every < 1 or first + (count - 1) * every >= len(self._names):
            raise ValueError(f"{count} shards lie in objects from number {first} on, of which there are not so many")
        own = slice(first, first + (count - 1) * every + 1, every)
        if offset < 0 or offset + size_bytes > self._sizes[own].min():
            raise ValueError(f"a shard lies outside {self._names[first]}, or one of its kind outside its object")
        self._left[own] -= size_bytes
        if self._left[own].min() < 0:  # bytes used many times over would become far more than what lies on the disk
            raise ValueError(f"{self._names[first]}, or one like it, is used for more bytes than it has")
        key = (first, count, every)
        return Run(self._known.setdefault(key, self._names[own]), offset, start, step, shape)


def _check_shape(name: str, shape: tuple[int, ...]) -> None:
    """Whether torch can make such a tensor at all."""
    if len(shape) > MAX_DIMS or min(shape, default=0) < 0 or prod(max(n, 1) for n in shape) > MAX_ITEMS:
        raise ValueError(f"{name} has the shape {list(shape[:MAX_DIMS])}")


def sealed(body: bytes) -> bytes:
    """A JSON object with the hash of its text as a last field."""
    return body[:-1] + SEAL + xxhash.xxh3_64_hexdigest(body).encode() + b'"}'


def unsealed(text: bytes) -> bytes:
    """What was sealed; raises ValueError where a single bit of it changed since."""
    body = text.rpartition(SEAL)[0] + b"}"
    if sealed(body) != text:
        raise ValueError("its text differs from its seal")
    return body


def _tensor(name: str, entry: dict[str, Any], table: Table, tiling: Tiling) -> TensorEntry:
    """Raises ValueError or KeyError for a tensor that cannot be, or that its shards do not tile."""
    dtype, shape = str(entry["dtype"]), tuple(map(int, entry["shape"]))
    _check_shape(name, shape)
    try:
        runs = tuple(table.run(row, ITEM_BYTES[dtype]) for row in entry["shards"])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    for run in runs:
        ends = [at + (len(run.objects) - 1) * by for at, by in zip(run.start, run.step, strict=True)]
        if len(run.start) != len(shape):
            raise ValueError(f"a shard of {name} has another rank than its tensor")
        if not prod(run.shape) and not all(0 <= a <= z <= n for a, z, n in zip(run.start, ends, shape, strict=True)):
            raise ValueError(f"an empty shard of {name} lies outside its shape {list(shape)}")
    if not tiling.is_exact(shape, (box for run in runs for box in run.boxes())):
        raise ValueError(f"the shards of {name} do not tile its shape {list(shape)}")
    return TensorEntry(dtype, shape, runs)
