"""Saves, retention and resumption at the same time, in one process at every point of each other, and in several."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.forked import Kill, forked_writers
from tests.support.points import WHEN, Points
from tests.support.seeds import seeded
from tests.support.subject import Subject, _small_chunks, root

from flextrain.checkpoint.requests import Writer
from flextrain.checkpoint.retention import Keep
from flextrain.errors import FlextrainError

__all__ = ["_small_chunks", "root"]
pytestmark = pytest.mark.usefixtures("_small_chunks")


def outcome(action: Callable[[], Any]) -> str:
    try:
        action()
    except FlextrainError as error:
        return error.code
    return "done"


def twin(subject: Subject) -> Subject:
    """The same run in another process, as it were."""
    return Subject(subject.root, subject.seed, subject.keep)


def some(subject: Subject, rng: random.Random) -> int:
    """A few checkpoints, and half a one that nobody finished; returns the newest step."""
    newest = rng.randint(1, 3)
    for step in range(1, newest + 1):
        subject.save(step)
    for step in rng.sample(range(1, newest + 2), rng.randint(0, 2)):
        leftover = Path(subject.root, f"step-{step:08d}", "dead")
        leftover.mkdir(exist_ok=True, parents=True)
        (leftover / f"rank-00000.{rng.choice(['part', 'bin'])}").write_bytes(b"half")
    return newest


@seeded(80)
def test_retention_by_another_process_at_any_point_of_a_save(root: Path, seed: int) -> None:
    rng = random.Random(seed)
    subject = Subject(root, seed, keep=rng.randint(1, 3))
    newest = some(subject, rng)
    other = twin(subject)
    with Points(rng.randint(1, 30), lambda: other.catalog.retire(Keep(subject.keep)), rng.choice(WHEN)):
        subject.save(newest + 1)
    assert subject.check() == list(range(1, newest + 2))[-subject.keep :]
    subject.save(newest + 2)
    assert subject.check() == list(range(1, newest + 3))[-subject.keep :]
    assert subject.leftovers() == set()


@seeded(60)
def test_a_save_at_any_point_of_retention_by_another_process(root: Path, seed: int) -> None:
    rng = random.Random(seed)
    subject = Subject(root, seed, keep=rng.randint(1, 3))
    newest = some(subject, rng)
    other = twin(subject)
    with Points(rng.randint(1, 15), lambda: other.save(newest + 1), rng.choice(WHEN)) as points:
        subject.catalog.retire(Keep(1))
    happened = len(points.seen) >= points.at
    assert subject.check()[-1] == newest + happened
    assert subject.resume() == newest + happened


@seeded(100)
def test_saves_and_retention_at_any_point_of_a_resumption(root: Path, seed: int) -> None:
    rng = random.Random(seed)
    subject = Subject(root, seed, keep=rng.randint(1, 2))
    newest = some(subject, rng)
    other, count = twin(subject), rng.randint(1, 3)

    def train_on() -> None:
        for step in range(newest + 1, newest + 1 + count):
            other.save(step)

    with Points(rng.randint(1, 20), train_on, rng.choice(WHEN)) as points:
        resumed = subject.resume()
    last = newest + count * (len(points.seen) >= points.at)
    assert resumed is not None
    assert newest <= resumed <= last
    assert subject.check() == list(range(1, last + 1))[-subject.keep :], "a commit was lost"


@seeded(60)
def test_a_resumption_at_any_point_of_a_save(root: Path, seed: int) -> None:
    rng = random.Random(seed)
    subject = Subject(root, seed, keep=rng.randint(1, 2))
    newest = some(subject, rng)
    other, found = twin(subject), []
    with Points(rng.randint(1, 30), lambda: found.append(other.resume()), rng.choice(WHEN)):
        subject.save(newest + 1)
    assert set(found) <= {newest, newest + 1}
    assert subject.resume() == newest + 1
    assert subject.check() == list(range(1, newest + 2))[-subject.keep :]


@seeded(80)
def test_a_second_saver_without_a_generation_that_saves_the_step_at_any_point_of_the_first_ones_save(
    root: Path, seed: int
) -> None:
    rng = random.Random(seed)
    subject = Subject(root, seed, keep=rng.randint(1, 2))
    newest = some(subject, rng)
    other = twin(subject)
    other.seed += 1_000_000  # other bytes
    theirs: list[str] = []
    with Points(rng.randint(1, 30), lambda: theirs.append(outcome(lambda: other.save(newest + 1))), rng.choice(WHEN)):
        ours = outcome(lambda: subject.save(newest + 1))
    assert sorted([ours, *theirs]) == ["FT-CKP-003", "done"] or (ours == "done" and not theirs)
    winner = subject if ours == "done" else other
    assert winner.resume() == newest + 1, "the checkpoint is not the one that was said to be committed"


@seeded(120)
def test_a_second_run_that_takes_over_at_any_point_of_the_first_ones_save(root: Path, seed: int) -> None:
    rng = random.Random(seed)
    subject = Subject(root, seed, keep=rng.randint(1, 2))
    subject.claim()
    newest = some(subject, rng)
    other, ahead = twin(subject), rng.randint(1, 2)  # it saves the same step, or has gone on to the next
    other.seed += 1_000_000
    theirs: list[str] = []

    def take_over() -> None:
        other.claim()
        theirs.append(outcome(lambda: other.save(newest + ahead)))

    with Points(rng.randint(1, 40), take_over, rng.choice(WHEN)):
        ours = outcome(lambda: subject.save(newest + 1))
    if ours == "done":
        assert theirs in ([], ["done"]) or (ahead, theirs) == (1, ["FT-CKP-003"])
    else:
        assert (ours, theirs) in [("FT-CKP-011", ["done"]), ("FT-CKP-003", ["done"])]
    winner = other if theirs == ["done"] else subject
    assert winner.resume() == newest + (ahead if theirs == ["done"] else 1), "an acknowledged commit is gone"
    if theirs:
        before = subject.catalog.steps()
        assert outcome(lambda: subject.save(newest + 5)) == "FT-CKP-011"
        assert subject.catalog.steps() == before, "a run that was superseded commits and deletes nothing"
        other.save(newest + 6)
    assert subject.leftovers() == set() if not theirs else other.leftovers() == set()


@seeded(80)
def test_a_run_that_takes_over_and_tidies_up_at_any_point_of_the_first_ones_save(root: Path, seed: int) -> None:
    """The old run's attempt is garbage at once. Whatever its writer does then, no manifest names what was removed."""
    rng = random.Random(seed)
    subject = Subject(root, seed, keep=3)
    subject.claim()
    newest = some(subject, rng)
    other = twin(subject)

    def take_over() -> None:
        other.claim()
        other.catalog.retire(Keep(3))

    with Points(rng.randint(1, 40), take_over, rng.choice(WHEN)):
        ours = outcome(lambda: subject.save(newest + 1))
    assert ours in ("done", "FT-CKP-011", "FT-CKP-012")
    before = list(range(1, newest + 1 + (ours == "done")))
    assert subject.check() in (before[-3:], before), "the old run may have been superseded before its retention"
    assert other.save(newest + 2)
    assert other.leftovers() == set()


@seeded(80)
def test_two_writer_processes_of_one_step_one_of_which_may_be_killed(root: Path, seed: int) -> None:
    rng = random.Random(seed)
    subjects = [Subject(root, seed), Subject(root, seed)]
    subjects[1].seed += 1_000_000
    fenced = rng.random() < 0.5  # the first one's generation is over before either begins
    for subject in subjects if fenced else []:
        subject.claim()
    kills = [rng.choice([None, Kill(rng.randint(1, 30), rng.choice(WHEN))]) for _ in subjects]
    with forked_writers(kills):
        writers = [Writer(subject.arena) for subject in subjects]
        requests = [subject.request(1) for subject in subjects]
        for writer, request in zip(writers, requests, strict=True):
            writer.submit(request)
        found = []
        for writer in writers:
            while (saved := writer.poll(30.0)) is None:
                pass
            found.append(saved.error.code if saved.error else "done")
            writer.close()
    assert set(found) <= {"FT-CKP-003", "FT-CKP-011" if fenced else "", "done"}
    assert found[1] == "done" if fenced else found.count("done") == 1
    winner = subjects[found.index("done")]
    assert winner.check() == [1]
    winner.save(2)
    assert winner.leftovers() == set()


@seeded(20, sample=1)
def test_saves_resumptions_and_retention_all_at_once(root: Path, seed: int) -> None:
    subject = Subject(root, seed, keep=1 + seed % 3)
    subject.save(1)
    other, heard, step = twin(subject), 1, 1
    with forked_writers():
        writer = Writer(subject.arena)
        free = [0, 1]
        while heard < 12:
            if free and step < 12:
                step += 1
                writer.submit(subject.request(step, free.pop()))
            if saved := writer.poll(0.0):
                assert saved.error is None
                heard = saved.step
                free.append(saved.slot)
            resumed = other.resume()
            assert resumed is not None
            assert resumed >= heard
            other.catalog.retire(Keep(subject.keep))
        writer.close()
    assert subject.check() == list(range(1, 13))[-subject.keep :]
