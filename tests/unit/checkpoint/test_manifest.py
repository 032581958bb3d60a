"""A manifest vouches for what it says, or is refused; a hostile one can neither run code nor lead elsewhere."""

import json
from typing import Any

import pytest

from flextrain.checkpoint.manifest import Manifest, ObjectEntry, Shard, TensorEntry, sealed, unsealed
from flextrain.errors import CheckpointCorrupt

SOUND = Manifest(
    step=5,
    attempt="abc",
    world_size=2,
    state={"position": 80},
    tensors={
        "model.w": TensorEntry.of(
            "float32",
            (4, 2),
            (Shard("abc/rank-00000.bin", 0, (0, 0), (2, 2)), Shard("abc/rank-00001.bin", 0, (2, 0), (2, 2))),
        ),
        "optim.w.step": TensorEntry.of("float32", (), (Shard("abc/rank-00000.bin", 64, (), ()),)),
    },
    objects={"abc/rank-00000.bin": ObjectEntry(128, ("00",)), "abc/rank-00001.bin": ObjectEntry(64, ("11",))},
)


def test_a_sound_manifest_survives_the_journey() -> None:
    assert Manifest.from_json(SOUND.to_json(), "here") == SOUND
    assert SOUND.size_bytes == 192


def edit(path: list[Any], value: Any) -> bytes:
    body = json.loads(unsealed(SOUND.to_json()))
    target = body
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return sealed(json.dumps(body).encode())


SHARD = ["tensors", "model.w", "shards", 0]
AT = {"object": 0, "offset": 0, "start": [0], "shape": [0]}
NONE = {"dtype": "float32", "shape": [0], "shards": []}
ALL = {"dtype": "float32", "shape": [32], "shards": [{**AT, "shape": [32]}]}
ROWS = [{**AT, "start": [row, 0], "shape": [1, 16]} for row in range(9)]
ROW = [{**AT, "start": [0, 0], "shape": [1, 32]}]
BROKEN = {
    "nothing": b"",
    "not json": sealed(b"{x}"),
    "a list": sealed(b"[]"),
    "no seal": unsealed(SOUND.to_json()),
    "another format": edit(["format"], "pickle"),
    "a newer version": edit(["schema_version"], 4),
    "no tensors": edit(["tensors"], None),
    "a missing shard": edit(["tensors", "model.w", "shards"], []),
    "an object outside the folder": edit([*SHARD, "object"], "../../etc/passwd"),
    "an object that is not there": edit([*SHARD, "object"], 2),
    "an object before the first": edit([*SHARD, "object"], -1),
    "an unknown dtype": edit(["tensors", "model.w", "dtype"], "object"),
    "a shard past its object": edit([*SHARD, "offset"], 4096),
    "a negative offset": edit([*SHARD, "offset"], -8),
    "a shard past its tensor": edit([*SHARD, "start"], [3, 0]),
    "a shard of another rank": edit([*SHARD, "start"], [0]),
    "shards that overlap": edit(["tensors", "model.w", "shards", 1, "start"], [1, 0]),
    "the same shard twice": edit(["tensors", "model.w", "shards", 1, "start"], [0, 0]),
    "a shard of negative size": edit([*SHARD, "shape"], [-2, -2]),
    "an empty shard far away": edit(["tensors", "optim.none"], {**NONE, "shards": [{**AT, "start": [1 << 70]}]}),
    "a tensor as large as no memory": edit(["tensors", "model.w", "shape"], [1 << 50, 2]),
    "nothing of absurd extent": edit(["tensors", "optim.none"], {**NONE, "shape": [0, 1 << 40, 1 << 40]}),
    "a scalar of a thousand dims": edit(["tensors", "optim.none"], {**NONE, "shape": [0] * 1000}),
    "the same bytes for many": edit(["tensors"], {f"model.w{i}": ALL for i in range(3)}),
    "a single byte for many": edit(["tensors", "model.w"], {**ALL, "shape": [9, 16], "shards": ROWS}),
    "too few chunk hashes": edit(["objects", "abc/rank-00000.bin", "chunks"], []),
    "an absolute object": edit(["objects"], {"/tmp/rank-00000.bin": {"size_bytes": 1, "chunks": ["0"]}}),
    "text for a step": edit(["step"], "five"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_unsound_manifest_is_refused_by_name(name: str) -> None:
    with pytest.raises(CheckpointCorrupt, match=r"runs/x/manifest\.json: not a sound manifest"):
        Manifest.from_json(BROKEN[name], "runs/x/manifest.json")


def test_every_single_bit_flip_is_found() -> None:
    text = SOUND.to_json()
    for place in range(len(text)):
        for bit in range(8):
            flipped = bytearray(text)
            flipped[place] ^= 1 << bit
            with pytest.raises(CheckpointCorrupt):
                Manifest.from_json(bytes(flipped), "here")


@pytest.mark.parametrize("tensor", [NONE, ALL, {**NONE, "shards": [AT]}, {**ALL, "shape": [1, 32], "shards": ROW}])
def test_what_the_broken_ones_are_made_from_is_sound(tensor: Any) -> None:
    found = Manifest.from_json(edit(["tensors"], {"model.x": tensor}), "here")
    assert found.tensors["model.x"].shape == tuple(tensor["shape"])


def test_a_tensor_is_never_larger_than_what_its_manifest_has_hashes_for() -> None:
    """One hash stands for at most CHUNK_BYTES, so a short manifest cannot make anybody allocate much."""
    text = edit(["objects", "abc/rank-00000.bin", "size_bytes"], 1 << 50)
    with pytest.raises(CheckpointCorrupt, match=r"has 1 chunk hashes for 1125899906842624 bytes"):
        Manifest.from_json(text, "here")
