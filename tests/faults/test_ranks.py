"""One rank's writer is killed or its disk is full: all ranks agree on what became of the save, within the timeout."""

import random
import resource
from pathlib import Path

import torch.distributed as dist
from tests.support.forked import Kill, forked_writers
from tests.support.points import WHEN
from tests.support.ranks import run_ranks
from tests.support.seeds import seeded
from tests.support.subject import Subject, root, small_chunks

from flextrain.checkpoint.requests import LIVES
from flextrain.errors import FlextrainError
from flextrain.world import World

__all__ = ["root"]
TIMEOUT_S = 3.0
FREE = resource.RLIM_INFINITY
STEPS = (1, 2, 3)


def save_with_a_fault(world: World, place: str, seed: int, fault: str) -> tuple[list[str], list[int]]:
    """What became of each step on this rank, and what is committed in the end."""
    small_chunks()
    rng = random.Random(seed)
    victim = rng.randrange(world.size)
    kills = {
        "killed": [Kill(rng.randint(1, 40), rng.choice(WHEN)) for _ in range(rng.randint(1, LIVES - 1))],
        "dies always": [None, *[Kill(rng.randint(1, 4), rng.choice(WHEN)) for _ in range(LIVES)]],
        "full disk": [],
    }[fault]
    room = rng.choice([0, 100, 1500, rng.randrange(1, 20_000)])
    outcomes = []
    with forked_writers(kills if world.rank == victim else []) as lives:
        subject = Subject(place, seed, timeout_s=TIMEOUT_S)
        for step in STEPS:
            subject.become(step)
            if step == 2 and world.rank == victim:
                if fault == "full disk":
                    resource.prlimit(lives[-1].pid, resource.RLIMIT_FSIZE, (room, FREE))
                elif fault == "dies always":
                    lives[-1].kill()
            try:
                subject.saver.save(step, {"step": step})
                outcomes.append("done")
            except FlextrainError as error:
                outcomes.append(error.code)
            dist.barrier()
            if fault == "full disk" and step == 2 and world.rank == victim:
                resource.prlimit(lives[-1].pid, resource.RLIMIT_FSIZE, (FREE, FREE))
        committed = subject.check()
        dist.barrier()
        subject.close()
    return outcomes, committed


def agreed(root: Path, seed: int, fault: str) -> list[bool]:
    """Whether each step was committed, in which all ranks and the catalog must agree."""
    ranks = run_ranks(2 + seed % 2, save_with_a_fault, str(root), seed, fault, timeout_s=60.0)
    done = [[outcome == "done" for outcome in outcomes] for outcomes, _ in ranks]
    assert all(rank == done[0] for rank in done), [outcomes for outcomes, _ in ranks]
    for _, committed in ranks:
        assert committed == [step for step, ok in zip(STEPS, done[0], strict=True) if ok][-2:]
    return done[0]


@seeded(24, sample=1)
def test_a_killed_writer_of_one_rank_costs_nothing(root: Path, seed: int) -> None:
    assert agreed(root, seed, "killed") == [True, True, True]


@seeded(16, sample=1)
def test_a_full_disk_of_one_rank_fails_the_save_on_all_or_on_none(root: Path, seed: int) -> None:
    first, _, last = agreed(root, seed, "full disk")
    assert first
    assert last


@seeded(4, sample=1)
def test_a_writer_of_one_rank_that_always_dies_fails_the_save_on_all(root: Path, seed: int) -> None:
    assert agreed(root, seed, "dies always") == [True, False, True]
