"""What ranks sign off makes the manifest that one would write shard by shard, and a regular one is short."""

import json
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flextrain.checkpoint.arena import Layout, Place
from flextrain.checkpoint.manifest import Manifest, ObjectEntry, Run, Shard, sealed, unsealed
from flextrain.checkpoint.parts import Part, merged, part_of
from flextrain.errors import CheckpointCorrupt

Shape = tuple[int, ...]


def cut(length: int, ranks: int) -> list[tuple[int, int]]:
    """(start, size) of each rank's rows, as FSDP deals them out: the last ones may get less, or none."""
    step = -(-length // ranks)
    return [(min(length, r * step), max(0, min(step, length - r * step))) for r in range(ranks)]


def boxes(shape: Shape, grid: tuple[int, ...]) -> list[tuple[Shape, Shape]]:
    """(start, shape) of the box of every rank of a mesh: dim d is cut by `grid[d]`, the last one varies fastest."""
    found: list[tuple[Shape, Shape]] = [((), ())]
    for length, ways in zip(shape, grid, strict=True):
        found = [((*start, at), (*size, n)) for start, size in found for at, n in cut(length, ways)]
    return found


def layout(rank: int, tensors: dict[str, tuple[Shape, tuple[int, ...]]]) -> Layout:
    places, offset = [], 0
    for name, (shape, grid) in tensors.items():
        start, size = boxes(shape, grid)[rank] if prod(grid) > 1 else ((0,) * len(shape), shape)
        if (prod(grid) > 1 or rank == len(name) % 2) and prod(size):  # replicated ones are written by one rank
            places.append(Place(name, "float32", start, size, shape, offset, 4 * prod(size)))
            offset += -(-4 * prod(size) // 64) * 64
    return Layout(tuple(places), offset)


def parts(ranks: int, tensors: dict[str, tuple[Shape, tuple[int, ...]]]) -> tuple[list[Part], dict[str, list[Shard]]]:
    """What the ranks sign off, and every shard they wrote."""
    signed, shards = [], {}
    for rank in range(ranks):
        own, name = layout(rank, tensors), f"g00000001-a/rank-{rank:05d}.bin"
        entry = ObjectEntry(own.size_bytes, ("0" * 16,) * bool(own.size_bytes))
        signed.append(part_of(own, name, entry) if own.size_bytes else Part())
        for p in own.places:
            shards.setdefault(p.name, []).append(Shard(name, p.offset, p.start, p.box_shape))
    return signed, shards


GRIDS = {1: [(1, 1)], 2: [(2, 1), (1, 2), (1, 1)], 6: [(6, 1), (1, 6), (3, 2), (2, 3), (1, 1)], 8: [(8, 1), (2, 4)]}


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, dict[str, tuple[Shape, tuple[int, ...]]]]:
    ranks = draw(st.sampled_from(sorted(GRIDS)))
    shapes = st.tuples(st.integers(0, 20), st.integers(1, 9))
    names = st.text("abc", min_size=1, max_size=3)
    return ranks, draw(st.dictionaries(names, st.tuples(shapes, st.sampled_from(GRIDS[ranks])), max_size=6))


@given(worlds())
@settings(max_examples=60, deadline=None)
def test_the_manifest_has_exactly_the_shards_that_were_written(
    world: tuple[int, dict[str, tuple[Shape, tuple[int, ...]]]],
) -> None:
    ranks, tensors = world
    signed, shards = parts(ranks, tensors)
    journey = [Part.from_json(part.to_json()) for part in signed]
    assert journey == signed == [Part.from_dict(json.loads(part.to_json())) for part in signed]
    manifest = merged(7, "g00000001-a", ranks, {}, journey)
    assert {name: set(entry.shards) for name, entry in manifest.tensors.items()} == {
        name: set(found) for name, found in shards.items()
    }
    assert all(entry.shard_count == len(shards[name]) for name, entry in manifest.tensors.items())
    assert Manifest.from_json(manifest.to_json(), "here") == manifest


@given(worlds(), st.data())
@settings(max_examples=40, deadline=None)
def test_no_shard_that_a_box_needs_is_left_out(
    world: tuple[int, dict[str, tuple[Shape, tuple[int, ...]]]], data: st.DataObject
) -> None:
    signed, shards = parts(*world)
    for name, entry in merged(7, "g00000001-a", world[0], {}, signed).tensors.items():
        start = tuple(data.draw(st.integers(0, n)) for n in entry.shape)
        size = tuple(data.draw(st.integers(0, n - a)) for n, a in zip(entry.shape, start, strict=True))
        needed = {
            s
            for s in shards[name]
            if all(max(a, b) < min(a + n, b + m) for a, n, b, m in zip(s.start, s.shape, start, size, strict=True))
        }
        assert needed <= set(entry.touching(start, size)) <= set(shards[name])


def test_equal_parts_of_any_number_of_ranks_are_a_run_or_two() -> None:
    signed, _ = parts(256, {"w": ((512, 4), (256, 1)), "b": ((250, 2), (256, 1)), "s": ((1, 1), (1, 1))})
    manifest = merged(7, "g00000001-a", 256, {}, signed)
    assert {name: len(entry.runs) for name, entry in manifest.tensors.items()} == {"w": 2, "b": 1, "s": 1}
    assert len(json.dumps(json.loads(manifest.to_json())["tensors"])) < 1000
    assert len(list(manifest.tensors["w"].touching((3, 0), (2, 4)))) == 2, "a load asks for what it needs, not for all"


RUN = {"object": 0, "count": 2, "every": 1, "offset": 0, "start": [0, 0], "step": [2, 0], "shape": [2, 2]}
NAMES = [f"abc/rank-0000{n}.bin" for n in (0, 1)]


@pytest.mark.parametrize(
    "change",
    [
        {"count": 3},
        {"count": 1 << 62},
        {"count": 0},
        {"count": -2},
        {"every": 0},
        {"every": 2},
        {"every": -1, "object": 1},
        {"step": [1, 0]},
        {"step": [-2, 0], "start": [2, 0]},
        {"step": [2]},
        {"step": [0, 0]},
        {"step": [2, 1]},
        {"step": [4, 0]},
        {"offset": 60},
        {"start": [0, 1]},
        {"shape": [0, 2]},
        {"shape": [-2, 2]},
    ],
    ids=str,
)
def test_a_run_that_does_not_hold_is_refused(change: dict[str, object]) -> None:
    objects = {name: ObjectEntry(64, ("00",)) for name in NAMES}
    empty = Manifest(5, "abc", 2, {}, {}, objects)
    body = json.loads(unsealed(empty.to_json()))
    body["tensors"] = {"w": {"dtype": "float32", "shape": [4, 2], "shards": [RUN]}}
    sound = Manifest.from_json(sealed(json.dumps(body).encode()), "here").tensors["w"]
    assert sound.runs == (Run(tuple(NAMES), 0, (0, 0), (2, 0), (2, 2)),)
    body["tensors"]["w"]["shards"] = [{**RUN, **change}]
    with pytest.raises(CheckpointCorrupt, match="not a sound manifest"):
        Manifest.from_json(sealed(json.dumps(body).encode()), "here")
