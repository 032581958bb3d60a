"""A disk that fails or fills up at any point of a save: the save says so or is whole, and no other one is harmed."""

import errno
import os
import random
import resource
from pathlib import Path

import pytest
from tests.support.forked import forked_writers
from tests.support.points import WHEN, WRITES, Points
from tests.support.seeds import seeded
from tests.support.subject import Subject, _small_chunks, root

from flextrain.checkpoint import Catalog, Keep
from flextrain.checkpoint.requests import Writer
from flextrain.errors import FlextrainError

__all__ = ["_small_chunks", "root"]
pytestmark = pytest.mark.usefixtures("_small_chunks")


def touches(subject: Subject, step: int, only: set[str] | None = None) -> int:
    """How many there are in a sound save."""
    with Points(only=only) as points:
        subject.save(step)
    return len(points.seen)


@seeded(300)
def test_an_error_at_any_point_of_a_save(root: Path, seed: int) -> None:
    rng = random.Random(seed)
    subject = Subject(root, seed, keep=rng.randint(1, 3))
    before = rng.randint(1, 4)
    for step in range(1, before):
        subject.save(step)
    only = rng.choice([None, WRITES])
    at = rng.randint(1, touches(subject, before, only))
    number = rng.choice([errno.EIO, errno.ENOSPC, errno.EDQUOT])

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    step, error = before + 1, None
    with Points(at, fail, rng.choice(WHEN), only, again=rng.random() < 0.5):
        try:
            subject.save(step)
        except FlextrainError as caught:
            error = caught
    committed = subject.check()
    newest = {*range(1, before + 1), *committed}
    assert set(sorted(newest)[-subject.keep :]) <= set(committed), "a commit was lost"
    assert error or step in committed
    if step not in committed:
        subject.save(step)
    subject.save(step + 1)
    assert subject.check() == list(range(1, step + 2))[-subject.keep :]
    assert subject.leftovers() == set()
    subject.close()


@seeded(40)
def test_a_full_disk_under_the_writer_process(root: Path, seed: int) -> None:
    rng = random.Random(seed)
    subject = Subject(root, seed)
    with forked_writers():
        writer = Writer(subject.arena)
        writer.submit(subject.request(1))
        assert answer(writer) is None
        room = rng.choice([0, 1, 100, 700, 1500, rng.randrange(1, subject.arena.layout.slot_bytes)])
        resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        writer.submit(subject.request(2))
        error = answer(writer)
        committed = subject.check()
        assert committed == ([1] if error else [1, 2])
        assert not list(root.rglob("*.part"))
        resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        writer.submit(subject.request(3))
        assert answer(writer) is None
        assert subject.check() == [*committed, 3][-2:]
        writer.close()
    subject.close()


def answer(writer: Writer) -> FlextrainError | None:
    while True:
        if saved := writer.poll(20.0):
            return saved.error


@seeded(60)
def test_retention_that_fails_does_not_undo_the_commit_before_it(root: Path, seed: int) -> None:
    rng = random.Random(seed)
    subject = Subject(root, seed, keep=1)
    subject.save(1)

    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    retire, at, when = Catalog.retire, rng.randint(1, 12), rng.choice(WHEN)

    def ailing(catalog: Catalog, keep: Keep) -> list[int]:
        with Points(at, fail, when, again=rng.random() < 0.5):
            return retire(catalog, keep)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Catalog, "retire", ailing)
        subject.save(2)
    assert 2 in subject.check()
    subject.save(3)
    assert subject.check() == [3]
    assert subject.leftovers() == set()
    subject.close()
