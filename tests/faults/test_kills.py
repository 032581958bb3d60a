"""SIGKILL at any point of a save: of the writer, which must cost nothing, and of the trainer with it, after which
every commit is whole, the newest acknowledged one is there, and a resumed state is one that was really snapshotted.
"""

import random
import signal
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from tests.support.forked import Kill, forked_writers, wait_for_end
from tests.support.points import WHEN
from tests.support.ranks import _context
from tests.support.seeds import seeded
from tests.support.subject import Subject, _small_chunks, root, small_chunks

from flextrain.checkpoint.requests import LIVES, Saved, Writer

__all__ = ["_small_chunks", "root"]
pytestmark = pytest.mark.usefixtures("_small_chunks")
TOUCHES = 30  # of a save
TIMEOUT_S = 60.0


def answers(writer: Writer, count: int) -> list[Saved]:
    found: list[Saved] = []
    while len(found) < count:
        if saved := writer.poll(TIMEOUT_S):
            found.append(saved)
    return found


@seeded(200)
def test_a_killed_writer_costs_nothing(root: Path, seed: int) -> None:
    rng = random.Random(seed)
    subject = Subject(root, seed, keep=rng.randint(1, 3))
    kills = [Kill(rng.randint(1, 2 * TOUCHES), rng.choice(WHEN)) for _ in range(rng.randint(1, LIVES - 1))]
    with forked_writers(kills) as lives:
        writer = Writer(subject.arena)
        attempts = {}
        for step in (1, 3):
            for slot in (0, 1):
                request = subject.request(step + slot, slot)
                attempts[step + slot] = request.attempt
                writer.submit(request)
            done = answers(writer, 2)
            assert [(saved.step, saved.slot, saved.error) for saved in done] == [(step, 0, None), (step + 1, 1, None)]
        assert writer.poll() is None
        writer.close()
    assert subject.check() == [1, 2, 3, 4][-subject.keep :]
    assert {
        step: subject.catalog.manifest(step).attempt for step in subject.catalog.steps()
    }.items() <= attempts.items()
    assert subject.leftovers() == set()
    assert len(lives) > 1 or kills[0].at > TOUCHES
    subject.close()


@seeded(10, sample=1)
def test_a_writer_that_always_dies_is_given_up(root: Path, seed: int) -> None:
    rng = random.Random(seed)
    subject = Subject(root, seed)
    subject.save(1)
    at = rng.randint(1, 8)
    with forked_writers([Kill(at, rng.choice(WHEN))] * LIVES) as lives:
        writer = Writer(subject.arena)
        writer.submit(subject.request(2))
        (saved,) = answers(writer, 1)
        assert saved.error
        assert saved.error.code == "FT-CKP-010"
        assert len(lives) == LIVES + 1
        writer.submit(subject.request(3, slot=1))
        assert answers(writer, 1)[0].error is None
        writer.close()
    assert subject.check() == [1, 3]
    subject.close()


def train(place: str, seed: int, first: int, kill: Kill | None, tell: Connection) -> None:
    """Save every step, overwriting the state at once; tell the writers' ids and each commit that was heard of."""
    small_chunks()
    with forked_writers([kill]) as lives:
        subject = Subject(place, seed)
        subject.saver.prepare()
        tell.send(lives[0].pid)
        for step in range(first, first + 5):
            subject.become(step)
            done = subject.saver.snapshot(step, {"step": step})
            subject.become(step + 100)
            for saved in done:
                tell.send(saved)
        for saved in subject.saver.wait():
            tell.send(saved)
        subject.close()


def run_trainer(place: Path, seed: int, first: int, kill: Kill | None) -> tuple[int, int]:
    """Exit code, and the newest step that the trainer knew to be committed (0: none)."""
    ours, theirs = _context.Pipe(duplex=False)
    process = _context.Process(target=train, args=(str(place), seed, first, kill, theirs))
    process.start()
    theirs.close()
    newest, writer = 0, ours.recv()
    with suppress(EOFError):
        while ours.poll(TIMEOUT_S):
            newest = max(newest, ours.recv().step)
    process.join(TIMEOUT_S)
    assert process.exitcode is not None, "the trainer hangs"
    wait_for_end(writer)
    return process.exitcode, newest


@seeded(160)
def test_a_killed_trainer_leaves_only_whole_checkpoints(root: Path, seed: int) -> None:
    rng = random.Random(seed)
    newest, first = 0, 1
    for _ in range(2):  # killed, resumed, killed again
        kill = Kill(rng.randint(1, 4 * TOUCHES), rng.choice(WHEN), trainer=True, lag=rng.choice([0, 0, 1, 5, 40]))
        code, heard = run_trainer(root, seed, first, kill)
        assert code in (0, -signal.SIGKILL)
        newest = max(newest, heard)
        subject = Subject(root, seed)
        subject.check()
        resumed = subject.resume() or 0
        assert resumed >= newest, "a commit that was acknowledged is gone"
        first = resumed + 1
    subject.save(first)
    assert subject.resume() == first
    assert subject.leftovers() == set()
    subject.close()
