"""Proof that a run took each sample exactly once, from what every rank recorded at every step.

A run is a chain of lives: it begins, and after every interruption a new life goes on from the step whose state it has.
Steps that an earlier life had done beyond that step are done again; what counts is the last time. Pure.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flextrain.tracking import names

Ids = NDArray[np.int64]
SHOWN = 10  # problems told one by one


@dataclass
class Life:
    """One call of `train` by all ranks: the step it began from, its plan, and what each rank took at each step."""

    begins: int
    plan: dict[str, int]
    steps: dict[int, dict[int, list[int]]] = field(default_factory=lambda: defaultdict(dict))

    def ids(self, step: int) -> Ids:
        """In the order of positions, which is that of ranks."""
        by_rank = self.steps.get(step, {})
        pieces = [np.asarray(by_rank[rank], np.int64) for rank in sorted(by_rank)]
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def is_whole(self, step: int) -> bool:
        return len(self.ids(step)) == self.plan["global_batch"]


@dataclass(frozen=True)
class Audit:
    """What was found. `first` and `last` are the steps looked at, `again` counts those done more than once."""

    first: int
    last: int
    samples: int
    lives: int
    again: int
    problems: tuple[str, ...]

    def summary(self) -> str:
        """A few lines for a terminal."""
        counts = f"{self.samples} samples, {self.lives} lives, {self.again} steps done again"
        found = [f"steps {self.first} to {self.last}, {counts}"]
        if not self.problems:
            found.append("each step took its share of the order, each sample once; what was done again was the same")
        more = len(self.problems) - SHOWN
        return "\n".join([*found, *self.problems[:SHOWN], *([f"… and {more} more problems"] if more > 0 else [])])


def audit(events: Iterable[dict[str, Any]]) -> Audit:
    """Look at the events of one run, of all its ranks and attempts."""
    lives = lives_of(events)
    counted: dict[int, Life] = {}
    again: list[tuple[int, Life, Life]] = []
    for life in lives:
        for step in [step for step in counted if step > life.begins]:
            earlier = counted.pop(step)
            if step in life.steps:
                again.append((step, earlier, life))
        counted.update(dict.fromkeys(life.steps, life))
    if counted and not counted[last := max(counted)].is_whole(last) and last < counted[last].plan["last_step"]:
        del counted[last]  # it was under way when the run ended, and is no part of any state
    first, last = min(counted, default=1), max(counted, default=0)
    problems = [*_gaps(counted, first, last), *_repeats(counted), *_changes(again)]
    samples = sum(len(life.ids(step)) for step, life in counted.items())
    return Audit(first, last, samples, len(lives), len({step for step, *_ in again}), tuple(problems))


def lives_of(events: Iterable[dict[str, Any]]) -> list[Life]:
    """The chain of lives, oldest first. Each rank says at the beginning of each what it is going to do."""
    count: dict[tuple[int, int, str], int] = defaultdict(int)
    lives: dict[tuple[int, int], Life] = {}
    for event in events:
        who = (event["attempt"], event["rank"], event["incarnation"])
        if event["kind"] != "event":
            continue
        if event["name"] == names.PLAN and "global_batch" in event["fields"]:
            count[who] += 1
            facts = event["fields"]
            plan = {key: facts[key] for key in ("global_batch", "num_samples", "first", "last_step")}
            lives.setdefault((event["attempt"], count[who]), Life(facts["begins"], plan))
        elif event["name"] == names.SAMPLES:
            life = lives[event["attempt"], count[who]]
            life.steps[event["fields"]["step"]][event["rank"]] = event["fields"]["ids"]
    return [lives[key] for key in sorted(lives)]


def _gaps(counted: dict[int, Life], first: int, last: int) -> Iterator[str]:
    for step in range(first, last + 1):
        if step not in counted:
            yield f"step {step}: no rank recorded it"
        elif not counted[step].is_whole(step):
            life = counted[step]
            ranks = ", ".join(map(str, sorted(life.steps[step])))
            found, wanted = len(life.ids(step)), life.plan["global_batch"]
            yield f"step {step}: {found} of {wanted} samples are recorded, by ranks {ranks}"


def _repeats(counted: dict[int, Life]) -> Iterator[str]:
    """Samples taken twice in one epoch; of steps that lack a rank's record nothing more is said."""
    taken: dict[int, dict[int, int]] = defaultdict(dict)
    for step, life in sorted(counted.items()):
        position = life.plan["first"] + (step - 1) * life.plan["global_batch"]
        for place, sample in enumerate(life.ids(step).tolist() if life.is_whole(step) else (), start=position):
            epoch = taken[place // life.plan["num_samples"]]
            if sample in epoch:
                yield f"step {step}: sample {sample} was taken at step {epoch[sample]} already, in the same epoch"
            epoch[sample] = step


def _changes(again: list[tuple[int, Life, Life]]) -> Iterator[str]:
    for step, earlier, later in again:
        if earlier.is_whole(step) and later.is_whole(step) and not np.array_equal(earlier.ids(step), later.ids(step)):
            yield f"step {step}: other samples were taken when it was done again"
