"""A manifest vouches for what it says, or is refused; a hostile one can neither run code nor lead elsewhere."""

import hashlib
import json
from typing import Any

import pytest

from flextrain.checkpoint.manifest import Manifest, ObjectEntry, Shard, TensorEntry
from flextrain.errors import CheckpointCorrupt

SOUND = Manifest(
    step=5,
    attempt="abc",
    world_size=2,
    state={"position": 80},
    tensors={
        "model.w": TensorEntry(
            "float32",
            (4, 2),
            (Shard("abc/rank-00000.bin", 0, (0, 0), (2, 2)), Shard("abc/rank-00001.bin", 0, (2, 0), (2, 2))),
        ),
        "optim.w.step": TensorEntry("float32", (), (Shard("abc/rank-00000.bin", 64, (), ()),)),
    },
    objects={"abc/rank-00000.bin": ObjectEntry(128, ("00",)), "abc/rank-00001.bin": ObjectEntry(64, ("11",))},
)


def test_a_sound_manifest_survives_the_journey() -> None:
    assert Manifest.from_json(SOUND.to_json(), "here") == SOUND
    assert SOUND.size_bytes == 192


def edit(path: list[Any], value: Any) -> bytes:
    """The sound manifest with one value changed, and a checksum that vouches for the change."""
    body = json.loads(SOUND.to_json())
    del body["sha256"]
    target = body
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    canonical = json.dumps(body, separators=(",", ":"), sort_keys=True).encode()
    return json.dumps({**body, "sha256": hashlib.sha256(canonical).hexdigest()}).encode()


SHARD = ["tensors", "model.w", "shards", 0]
BROKEN = {
    "not json": b"{",
    "a list": b"[]",
    "another format": edit(["format"], "pickle"),
    "a newer version": edit(["schema_version"], 2),
    "no tensors": edit(["tensors"], None),
    "a missing shard": edit(["tensors", "model.w", "shards"], []),
    "an object outside the folder": edit([*SHARD, "object"], "../../etc/passwd"),
    "an unknown dtype": edit(["tensors", "model.w", "dtype"], "object"),
    "a shard past its object": edit([*SHARD, "offset"], 4096),
    "a negative offset": edit([*SHARD, "offset"], -8),
    "a shard past its tensor": edit([*SHARD, "start"], [3, 0]),
    "a shard of another rank": edit([*SHARD, "start"], [0]),
    "too few chunk hashes": edit(["objects", "abc/rank-00000.bin", "chunks"], []),
    "an absolute object": edit(["objects"], {"/tmp/rank-00000.bin": {"size_bytes": 1, "chunks": ["0"]}}),
    "text for a step": edit(["step"], "five"),
    "brackets without end": b"[" * 100_000,
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_unsound_manifest_is_refused_by_name(name: str) -> None:
    with pytest.raises(CheckpointCorrupt, match=r"runs/x/manifest\.json: not a sound manifest"):
        Manifest.from_json(BROKEN[name], "runs/x/manifest.json")


def test_every_single_flipped_bit_is_found() -> None:
    raw = SOUND.to_json()
    for position in range(len(raw)):
        flipped = bytearray(raw)
        flipped[position] ^= 1 << position % 7
        with pytest.raises(CheckpointCorrupt):
            Manifest.from_json(bytes(flipped), "here")
