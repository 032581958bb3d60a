"""Which checkpoints and leftovers may go. Pure functions over names and ages."""

from collections.abc import Iterable, Mapping

ORPHAN_AGE_S = 3600.0


def steps_to_delete(committed: Iterable[int], keep_last_n: int) -> list[int]:
    """Committed steps beyond the newest `keep_last_n`, oldest first. Uncommitted ones never count as kept."""
    assert keep_last_n >= 1
    return sorted(committed)[:-keep_last_n]


def orphaned_attempts(
    attempts: Mapping[tuple[int, str], float],
    committed: Mapping[int, str],
    now_s: float,
    max_age_s: float = ORPHAN_AGE_S,
) -> list[tuple[int, str]]:
    """Attempts, (step, attempt id) -> time of last write, that no manifest names and nobody can still be writing.

    An attempt that lost its step to another one is dead at once where the winner is committed; any other is left alone
    until `max_age_s` after its last write, since its writer may live.
    """
    return sorted(
        key
        for key, written_s in attempts.items()
        if committed.get(key[0]) != key[1] and (key[0] in committed or now_s - written_s > max_age_s)
    )
