"""Proof that a run took each sample exactly once, from what every rank recorded at every step.

A run is a chain of lives: it begins, and after every interruption a new life goes on from the step whose state it has.
Steps that an earlier life had done beyond that step are done again; what counts is the last time. Pure.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flextrain.tracking import names

Ids = NDArray[np.int64]
Order = Callable[[int, int, int, int], Ids]
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
            found.append(
                "each step took the samples that the order has there, each once; what was done again was the same"
            )
        more = len(self.problems) - SHOWN
        return "\n".join([*found, *self.problems[:SHOWN], *([f"… and {more} more problems"] if more > 0 else [])])


def audit(events: Iterable[dict[str, Any]], order: Order) -> Audit:
    """Look at the events of one run, of all its ranks and attempts; `order(num_samples, seed, position, count)` says
    which samples belong there."""
    lives, reached = lives_of(events)
    counted: dict[int, Life] = {}
    again: list[tuple[int, Life, Life]] = []
    for life in lives:
        for step in [step for step in counted if step > life.begins]:
            earlier = counted.pop(step)
            if step in life.steps:
                again.append((step, earlier, life))
        counted.update(dict.fromkeys(life.steps, life))
    if counted and (last := max(counted)) > reached and not counted[last].is_whole(last):
        del counted[last]  # it was under way when the run ended, and is no part of any state
    first, last = lives[0].begins + 1 if lives else 1, max([*counted, reached])
    problems = [*_gaps(counted, first, last), *_repeats(counted), *_strays(counted, order), *_changes(again)]
    samples = sum(len(life.ids(step)) for step, life in counted.items())
    if not lives:
        problems = ["there is no record of what was taken"]
    return Audit(first, last, samples, len(lives), len({step for step, *_ in again}), tuple(problems))


def lives_of(events: Iterable[dict[str, Any]]) -> tuple[list[Life], int]:
    """The chain of lives, oldest first, and the newest step that was committed or gone on from. Each rank says at the
    beginning of each life what it is going to do."""
    count: dict[tuple[int, int, str], int] = defaultdict(int)
    lives: dict[tuple[int, int], Life] = {}
    reached = 0
    for event in events:
        if event["kind"] != "event":
            continue
        who, facts = (event["attempt"], event["rank"], event["incarnation"]), event["fields"]
        if event["name"] == names.PLAN and "global_batch" in facts:
            count[who] += 1
            plan = {key: facts[key] for key in ("global_batch", "num_samples", "seed", "first")}
            lives.setdefault((event["attempt"], count[who]), Life(facts["begins"], plan))
        elif event["name"] == names.SAMPLES:
            lives[event["attempt"], count[who]].steps[facts["step"]][event["rank"]] = facts["ids"]
        elif event["name"] in (names.CHECKPOINT, names.RESUME):
            reached = max(reached, facts["step"])
    return [lives[key] for key in sorted(lives)], reached


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


def _strays(counted: dict[int, Life], order: Order) -> Iterator[str]:
    """Steps that took other samples than the order has there."""
    for step, life in sorted(counted.items()):
        batch = life.plan["global_batch"]
        position = life.plan["first"] + (step - 1) * batch
        expected = order(life.plan["num_samples"], life.plan["seed"], position, batch)
        if life.is_whole(step) and not np.array_equal(life.ids(step), expected):
            yield f"step {step}: its samples are not those that the order has there"


def _changes(again: list[tuple[int, Life, Life]]) -> Iterator[str]:
    for step, earlier, later in again:
        if earlier.is_whole(step) and later.is_whole(step) and not np.array_equal(earlier.ids(step), later.ids(step)):
            yield f"step {step}: other samples were taken when it was done again"
