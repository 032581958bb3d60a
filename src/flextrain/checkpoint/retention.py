"""Which checkpoints and leftovers may go. Pure functions over names, numbers and ages."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from flextrain.checkpoint.generation import Standing, generation_of
from flextrain.config.schema import CheckpointConfig
from flextrain.errors import CheckpointError

ORPHAN_AGE_S = 3600.0


@dataclass(frozen=True)
class Keep:
    """Which committed checkpoints stay: the newest `last_n`, every step that `every` divides (None: none for that), and
    the `best_n` whose `metric`, a number in the manifest's `state`, is the smallest (`mode` "min") or largest."""

    last_n: int
    every: int | None = None
    best_n: int = 0
    metric: str = "loss"
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        assert self.last_n >= 1, self
        assert self.every is None or self.every >= 1, self
        assert self.best_n >= 0, self
        assert self.mode in ("min", "max"), self

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError where the best are to be kept by something that `state` has no number for."""
        known = numbers(state)
        if self.best_n and self.metric not in known:
            raise CheckpointError(
                f"the best checkpoints are to be kept by {self.metric!r}, which is no number in their state",
                number=32,
                remedy=f"the numbers there are: {', '.join(sorted(known)) or 'none'}",
            )


def keep_of(settings: CheckpointConfig) -> Keep:
    """What a configuration asks to be kept."""
    return Keep(
        settings.keep_last_n,
        settings.keep_every,
        settings.keep_best_n,
        settings.keep_best_metric,
        settings.keep_best_mode,
    )


def numbers(state: Mapping[str, Any]) -> dict[str, float]:
    """The values of a manifest's `state` that checkpoints can be compared by."""
    return {
        name: value for name, value in state.items() if isinstance(value, int | float) and not isinstance(value, bool)
    }


def steps_to_delete(committed: Mapping[int, float | None], keep: Keep) -> list[int]:
    """Committed steps that nothing in `keep` speaks for, oldest first.

    `committed` maps each step to its metric; what is None, NaN or infinite is never among the best. Of equals the later
    step is better. Deciding again after a deletion, or at every save, keeps what one decision at the end would keep.
    """
    steps, sign = sorted(committed), 1 if keep.mode == "min" else -1
    ranked = sorted(
        (sign * metric, -step) for step, metric in committed.items() if metric is not None and abs(metric) < inf
    )
    kept = {*steps[-keep.last_n :], *(-negated for _, negated in ranked[: keep.best_n])}
    return [step for step in steps if step not in kept and (keep.every is None or step % keep.every)]


def orphaned_attempts(
    attempts: Mapping[tuple[int, str], float],
    committed: Mapping[int, str | None],
    now_s: float,
    newest: Standing | None = None,
    max_age_s: float = ORPHAN_AGE_S,
) -> list[tuple[int, str]]:
    """Attempts, (step, attempt id) -> time of last write, that no manifest names and that cannot be committed any more.

    `committed` has the attempt that the manifest of each committed step names, None where that cannot be told. Dead at
    once are attempts that lost their step to another, and those of generations before the `newest`. Those of the newest
    are never dead while its lease is live. For all others, whose writer may live, `max_age_s` after their last write
    decides.
    """

    def dead(step: int, attempt: str, written_s: float) -> bool:
        winner, own = committed.get(step), generation_of(attempt)
        if winner is not None:
            return attempt != winner
        if step not in committed and own is not None and newest is not None:
            if own < newest.number:
                return True
            if own == newest.number and newest.is_live(now_s):
                return False
        return now_s - written_s > max_age_s

    return sorted(key for key, written_s in attempts.items() if dead(*key, written_s))
