"""A node's own disk between memory and the store: killed, full, failing or damaged anywhere, it costs no commit, and
what it holds is never trusted further than its hashes.
"""

import errno
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.damage import damage
from tests.support.forked import Kill, forked_writers
from tests.support.points import WHEN, Points
from tests.support.seeds import seeded
from tests.support.subject import CHUNK_BYTES, Subject, _small_chunks, root

from flextrain.checkpoint import CheckpointSaver
from flextrain.checkpoint.requests import LIVES, Request, Saved, Writer
from flextrain.checkpoint.tiers import Route
from flextrain.checkpoint.writer import save
from flextrain.errors import CheckpointCorrupt, FlextrainError

__all__ = ["_small_chunks", "root"]
pytestmark = pytest.mark.usefixtures("_small_chunks")
TOUCHES = 60  # of a save by way of the disk
TIMEOUT_S = 60.0


class Node:
    """A state saved to `root`/store by way of `root`/disk."""

    def __init__(self, root: Path, seed: int, keep: int = 3) -> None:
        self.disk, self.store = root / "disk", root / "store"
        self.subject = Subject(self.store, seed, keep=keep)
        self.route = Route(str(self.disk))

    def request(self, step: int, slot: int = 0) -> Request:
        return replace(self.subject.request(step, slot), route=self.route)

    def save(self, step: int) -> None:
        save(self.request(step), self.subject.arena)

    def resume(self) -> int | None:
        """What a new process on this node finds: the step, whose state it then has."""
        subject = self.subject
        subject.become(0)
        found = CheckpointSaver(subject.catalog, subject.model, subject.optimizer, route=self.route).resume()
        if found is None:
            return None
        assert found.state == {"step": found.step}
        assert subject.is_at(found.step), f"resumed a state that is not that of step {found.step}"
        return found.step

    def files(self, step: int) -> dict[str, Path]:
        """What a step consists of, in both places."""
        near, far = (place / f"step-{step:08d}" for place in (self.disk, self.store))
        return {
            "near data": next(near.glob("*/rank-00000.bin")),
            "near record": next(near.glob("*/rank-00000.json")),
            "far data": next(far.glob("*/rank-00000.bin")),
            "far manifest": far / "manifest.json",
        }


def answers(writer: Writer, staged: int, final: int) -> list[Saved]:
    """Until that many slots are free and that many saves committed."""
    found: list[Saved] = []
    while sum(saved.staged for saved in found) < staged or sum(not saved.staged for saved in found) < final:
        if saved := writer.poll(TIMEOUT_S):
            found.append(saved)
    return found


@seeded(120, sample=1)
def test_a_writer_killed_between_disk_and_store_costs_nothing(root: Path, seed: int) -> None:
    rng = random.Random(seed)
    node = Node(root, seed, keep=rng.randint(1, 3))
    kills = [Kill(rng.randint(1, 2 * TOUCHES), rng.choice(WHEN)) for _ in range(rng.randint(1, LIVES - 1))]
    with forked_writers(kills):
        writer, found = Writer(node.subject.arena), []
        for step in (1, 3):
            for slot in (0, 1):
                writer.submit(node.request(step + slot, slot))
            found += answers(writer, staged=2, final=0)  # the slots are written over while uploads are under way
        found += answers(writer, staged=0, final=4 - sum(not saved.staged for saved in found))
        writer.close()
    assert [saved.error for saved in found] == [None] * 8
    assert sorted(saved.step for saved in found if not saved.staged) == [1, 2, 3, 4]
    assert node.subject.check() == [1, 2, 3, 4][-node.subject.keep :]
    assert node.resume() == 4
    assert node.subject.leftovers() == set()
    node.subject.close()


@seeded(150)
def test_every_chunk_comes_from_where_it_is_sound(root: Path, seed: int) -> None:
    rng = random.Random(seed)
    node, steps = Node(root, seed), (1, 2, 3)
    for step in steps:
        node.save(step)
    files = {step: node.files(step) for step in steps}
    intact = {step: {kind: path.read_bytes() for kind, path in files[step].items()} for step in steps}
    every = [(step, kind) for step in steps for kind in files[step]]
    for step, kind in rng.sample(every, rng.randint(1, 7)):
        damage(rng, files[step][kind], [intact[other][kind] for other in steps if other != step])

    def left(step: int, kind: str) -> bytes:
        return files[step][kind].read_bytes() if files[step][kind].exists() else b""

    def whole(step: int) -> bool:
        data = intact[step]["near data"]
        places = [now for now in (left(step, "near data"), left(step, "far data")) if len(now) == len(data)]
        spans = [slice(at, at + CHUNK_BYTES) for at in range(0, len(data), CHUNK_BYTES)]
        recorded = [left(other, "near record") for other in steps]  # a record speaks for itself, wherever it lies
        known = intact[step]["near record"] in recorded or left(step, "far manifest") == intact[step]["far manifest"]
        return known and all(any(now[span] == data[span] for now in places) for span in spans)

    newest = max(filter(whole, steps), default=None)
    try:
        found = node.resume()
    except CheckpointCorrupt:
        assert newest is None, "the weights would be spoilt"
        found = node.resume()
    assert found == newest
    node.save(9)
    assert node.resume() == 9
    node.subject.close()


@seeded(100)
def test_a_disk_that_fails_while_it_is_read_gives_way_to_the_store(root: Path, seed: int) -> None:
    rng = random.Random(seed)
    node = Node(root, seed)
    node.save(1)
    node.save(2)

    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Points(only={"preadv"}) as points:
        assert node.resume() == 2
    with Points(rng.randint(1, len(points.seen)), fail, rng.choice(["before", "after"]), {"preadv"}):
        assert node.resume() == 2
    assert node.subject.check() == [1, 2]
    node.subject.close()


@seeded(150)
def test_a_disk_that_fails_or_fills_up_while_it_is_written_loses_no_commit(root: Path, seed: int) -> None:
    rng = random.Random(seed)
    node = Node(root, seed, keep=2)
    with Points() as points:
        node.save(1)
    number = rng.choice([errno.EIO, errno.ENOSPC, errno.EDQUOT])

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    error = None
    with Points(rng.randint(1, len(points.seen)), fail, rng.choice(WHEN), again=rng.random() < 0.5):
        try:
            node.save(2)
        except (FlextrainError, OSError) as caught:
            error = caught
    committed = node.subject.check()
    assert 1 in committed, "a commit was lost"
    assert error or 2 in committed
    assert node.resume() in (1, 2)
    node.save(3)
    assert node.resume() == 3
    assert node.subject.check()[-1] == 3
    node.subject.close()
