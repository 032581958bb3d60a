"""The manifest of a checkpoint: what it holds, where each byte lies, the hash of every chunk. JSON, never pickle.

Its last field, the seal, is a hash of all that stands before it: a flipped bit that leaves JSON behind is found too.
"""

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

import xxhash

from flextrain.checkpoint.tiling import MAX_DIMS, Tiling
from flextrain.errors import CheckpointCorrupt

FORMAT = "flextrain-checkpoint"
SCHEMA_VERSION = 2
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
class TensorEntry:
    """A tensor of the whole model: its dtype, full shape, and the shards that tile it."""

    dtype: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]


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
        body = {"format": FORMAT, "schema_version": SCHEMA_VERSION, **asdict(self)}
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
            manifest = cls(
                step=int(body["step"]),
                attempt=str(body["attempt"]),
                world_size=int(body["world_size"]),
                state=dict(body["state"]),
                tensors={name: _tensor(entry) for name, entry in body["tensors"].items()},
                objects={
                    name: ObjectEntry(int(o["size_bytes"]), tuple(o["chunks"])) for name, o in body["objects"].items()
                },
            )
            manifest._check()
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise CheckpointCorrupt(
                f"{where}: not a sound manifest ({error})",
                number=1,
                remedy="an older checkpoint is used where there is one",
            ) from error
        return manifest

    def _check(self) -> None:
        for name, entry in self.objects.items():
            if not OBJECT_NAME.fullmatch(name):
                raise ValueError(f"object name {name!r} leads elsewhere")
            if len(entry.chunks) != -(-entry.size_bytes // CHUNK_BYTES):
                raise ValueError(f"{name} has {len(entry.chunks)} chunk hashes for {entry.size_bytes} bytes")
        room = {name: entry.size_bytes for name, entry in self.objects.items()}
        tiling = Tiling()
        for name, tensor in self.tensors.items():
            _check_shape(name, tensor.shape)
            for shard in tensor.shards:
                room[shard.object] -= self._check_shard(name, tensor, shard)
            if not tiling.is_exact(tensor.shape, ((shard.start, shard.shape) for shard in tensor.shards)):
                raise ValueError(f"the shards of {name} do not tile its shape {list(tensor.shape)}")
        for name, left in room.items():
            if left < 0:  # bytes used many times over would become a tensor much larger than what lies on the disk
                raise ValueError(f"{name} is used for {-left} bytes more than it has")

    def _check_shard(self, name: str, tensor: TensorEntry, shard: Shard) -> int:
        """Its bytes."""
        if not len(shard.start) == len(shard.shape) == len(tensor.shape):
            raise ValueError(f"a shard of {name} has another rank than its tensor")
        if min(shard.shape, default=0) < 0:
            raise ValueError(f"a shard of {name} has the shape {list(shard.shape)}")
        size_bytes = prod(shard.shape) * ITEM_BYTES[tensor.dtype]
        if not size_bytes and not all(0 <= a <= full for a, full in zip(shard.start, tensor.shape, strict=True)):
            raise ValueError(f"an empty shard of {name} lies outside its shape {list(tensor.shape)}")
        if shard.offset < 0 or shard.offset + size_bytes > self.objects[shard.object].size_bytes:
            raise ValueError(f"a shard of {name} lies outside {shard.object}")
        return size_bytes


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


def _tensor(entry: dict[str, Any]) -> TensorEntry:
    shards = tuple(
        Shard(str(s["object"]), int(s["offset"]), tuple(map(int, s["start"])), tuple(map(int, s["shape"])))
        for s in entry["shards"]
    )
    return TensorEntry(str(entry["dtype"]), tuple(map(int, entry["shape"])), shards)
