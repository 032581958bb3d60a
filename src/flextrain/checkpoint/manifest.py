"""The manifest of a checkpoint: what it holds, where each byte lies, the hash of every chunk. JSON, never pickle."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

from flextrain.errors import CheckpointCorrupt

FORMAT = "flextrain-checkpoint"
SCHEMA_VERSION = 1
CHUNK_BYTES = 16 << 20
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
}
OBJECT_NAME = re.compile(r"^[A-Za-z0-9-]+/rank-\d{5,}\.bin$")  # never leads outside the step's folder


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
        """The file's content: the body, and the sha256 that vouches for it."""
        return _canonical({**self._body(), "sha256": self.digest})

    @property
    def digest(self) -> str:
        """sha256 of the body, and so of everything it hashes."""
        return hashlib.sha256(_canonical(self._body())).hexdigest()

    def _body(self) -> dict[str, Any]:
        return {"format": FORMAT, "schema_version": SCHEMA_VERSION, **asdict(self)}

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.objects.values())

    @classmethod
    def from_json(cls, text: bytes, where: str) -> "Manifest":
        """Parse and check a manifest read from `where`; raises CheckpointCorrupt for anything it cannot vouch for."""
        try:
            body = json.loads(text)
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
            if body.get("sha256") != manifest.digest:
                raise ValueError("it differs from its own sha256")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointCorrupt(
                f"{where}: not a sound manifest ({error})",
                number=1,
                remedy="an older checkpoint is used where there is one",
            ) from error
        return manifest

    def _check(self) -> None:
        for name, entry in self.objects.items():
            if not OBJECT_NAME.match(name):
                raise ValueError(f"object name {name!r} leads elsewhere")
            if len(entry.chunks) != -(-entry.size_bytes // CHUNK_BYTES):
                raise ValueError(f"{name} has {len(entry.chunks)} chunk hashes for {entry.size_bytes} bytes")
        for name, tensor in self.tensors.items():
            if sum(prod(s.shape) for s in tensor.shards) != prod(tensor.shape):
                raise ValueError(f"the shards of {name} do not tile its shape {list(tensor.shape)}")
            for shard in tensor.shards:
                self._check_shard(name, tensor, shard)

    def _check_shard(self, name: str, tensor: TensorEntry, shard: Shard) -> None:
        if not len(shard.start) == len(shard.shape) == len(tensor.shape):
            raise ValueError(f"a shard of {name} has another rank than its tensor")
        if any(
            a < 0 or n < 0 or a + n > full for a, n, full in zip(shard.start, shard.shape, tensor.shape, strict=True)
        ):
            raise ValueError(f"a shard of {name} lies outside its shape {list(tensor.shape)}")
        end = shard.offset + prod(shard.shape) * ITEM_BYTES[tensor.dtype]
        if shard.offset < 0 or end > self.objects[shard.object].size_bytes:
            raise ValueError(f"a shard of {name} lies outside {shard.object}")


def _canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":"), sort_keys=True).encode()


def _tensor(entry: dict[str, Any]) -> TensorEntry:
    shards = tuple(
        Shard(str(s["object"]), int(s["offset"]), tuple(map(int, s["start"])), tuple(map(int, s["shape"])))
        for s in entry["shards"]
    )
    return TensorEntry(str(entry["dtype"]), tuple(map(int, entry["shape"])), shards)
