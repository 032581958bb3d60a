"""The commit, without collectives: every rank signs off its part with a record, rank 0 gathers them and commits.

A rank that fails signs off its error instead, and one that never answers strands nobody longer than the timeout.
"""

import json
import time
from dataclasses import asdict, dataclass
from typing import Any

from flextrain.checkpoint.catalog import MANIFEST, Catalog
from flextrain.checkpoint.manifest import Manifest, ObjectEntry, Shard, TensorEntry
from flextrain.errors import CheckpointError, FlextrainError, StorageError, unpack

POLL_S = 0.02
REMOTE_POLL_S = 0.25
FAILED = "failed.json"


@dataclass(frozen=True)
class Part:
    """What one rank wrote: its shards as (tensor name, dtype, full shape, shard), and its objects by name."""

    shards: list[tuple[str, str, tuple[int, ...], Shard]]
    objects: dict[str, ObjectEntry]

    def to_json(self) -> bytes:
        shards = [(name, dtype, shape, asdict(shard)) for name, dtype, shape, shard in self.shards]
        return json.dumps({"shards": shards, "objects": {k: asdict(v) for k, v in self.objects.items()}}).encode()

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> "Part":
        shards = [
            (name, dtype, tuple(shape), Shard(s["object"], s["offset"], tuple(s["start"]), tuple(s["shape"])))
            for name, dtype, shape, s in body["shards"]
        ]
        objects = {k: ObjectEntry(v["size_bytes"], tuple(v["chunks"])) for k, v in body["objects"].items()}
        return cls(shards, objects)


@dataclass(frozen=True)
class Attempt:
    """One try at saving one step, by `world_size` ranks together."""

    step: int
    name: str
    world_size: int

    def record(self, rank: int) -> str:
        return f"{self.name}/rank-{rank:05d}.json"

    def data(self, rank: int) -> str:
        return f"{self.name}/rank-{rank:05d}.bin"


def merge(attempt: Attempt, state: dict[str, Any], parts: list[Part]) -> Manifest:
    """One manifest from what every rank wrote. Pure."""
    shards: dict[str, list[Shard]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for part in parts:
        for name, dtype, shape, shard in part.shards:
            kinds[name] = (dtype, shape)
            shards.setdefault(name, []).append(shard)
    tensors = {name: TensorEntry(*kinds[name], tuple(found)) for name, found in shards.items()}
    objects = {name: entry for part in parts for name, entry in part.objects.items()}
    return Manifest(attempt.step, attempt.name, attempt.world_size, state, tensors, objects)


def sign_off(catalog: Catalog, attempt: Attempt, rank: int, part: Part | FlextrainError) -> None:
    body = json.dumps({"error": part.pack()}).encode() if isinstance(part, FlextrainError) else part.to_json()
    catalog.folder(attempt.step).put(attempt.record(rank), body)


def gather(catalog: Catalog, attempt: Attempt, timeout_s: float) -> list[Part]:
    """Every rank's part, in order; raises the first error signed off, or CheckpointError after `timeout_s`."""
    folder, records = catalog.folder(attempt.step), [attempt.record(rank) for rank in range(attempt.world_size)]
    found: dict[str, Part] = {}
    deadline = time.monotonic() + timeout_s
    while True:
        for key in {entry.key for entry in folder.list(attempt.name)}.intersection(records) - found.keys():
            body = json.loads(folder.get(key))
            if "error" in body:
                raise unpack(body["error"])
            found[key] = Part.from_dict(body)
        if len(found) == attempt.world_size:
            return [found[key] for key in records]
        if time.monotonic() > deadline:
            silent = [rank for rank, key in enumerate(records) if key not in found]
            raise _silent(attempt, f"ranks {silent[:8]} signed off nothing", timeout_s)
        _wait(catalog)


def commit(catalog: Catalog, attempt: Attempt, state: dict[str, Any], keep_last_n: int, timeout_s: float) -> Manifest:
    """Rank 0's half: gather, commit, retire what is too old. Where it fails, all others are told."""
    try:
        manifest = merge(attempt, state, gather(catalog, attempt, timeout_s))
        catalog.commit(manifest)
    except FlextrainError as error:
        catalog.folder(attempt.step).put(f"{attempt.name}/{FAILED}", json.dumps(error.pack()).encode())
        raise
    catalog.retire(keep_last_n)
    return manifest


def await_commit(catalog: Catalog, attempt: Attempt, timeout_s: float) -> Manifest:
    """The others' half: the manifest once it is there; raises what made rank 0 give up."""
    folder = catalog.folder(attempt.step)
    deadline = time.monotonic() + timeout_s
    while True:
        if folder.size(MANIFEST) is not None:
            manifest = catalog.manifest(attempt.step)
            if manifest.attempt == attempt.name:
                return manifest
        try:
            raise unpack(json.loads(folder.get(f"{attempt.name}/{FAILED}")))
        except StorageError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
        if time.monotonic() > deadline:
            raise _silent(attempt, "rank 0 neither committed nor gave up", timeout_s)
        _wait(catalog)


def _wait(catalog: Catalog) -> None:
    time.sleep(POLL_S if catalog.store.local_root else REMOTE_POLL_S)


def _silent(attempt: Attempt, what: str, timeout_s: float) -> CheckpointError:
    return CheckpointError(
        f"step {attempt.step}: {what} within {timeout_s:.0f} s",
        number=9,
        remedy="look at the logs of those ranks; what was committed before is unharmed",
    )
