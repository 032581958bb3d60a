"""Which checkpoints go: properties over all histories."""

from hypothesis import given
from hypothesis import strategies as st

from flextrain.checkpoint.retention import ORPHAN_AGE_S, orphaned_attempts, steps_to_delete

STEPS = st.lists(st.integers(0, 10_000), unique=True)


@given(STEPS, st.integers(1, 10))
def test_the_newest_n_stay_and_all_others_go(steps: list[int], keep: int) -> None:
    gone = steps_to_delete(steps, keep)
    kept = sorted(set(steps) - set(gone))
    assert kept == sorted(steps)[-keep:]
    assert gone == sorted(gone)


ATTEMPTS = st.dictionaries(st.tuples(st.integers(0, 5), st.sampled_from("abc")), st.floats(0, 10_000))


@given(ATTEMPTS, st.dictionaries(st.integers(0, 5), st.sampled_from("abc")), st.floats(0, 20_000))
def test_what_is_committed_or_may_still_be_written_is_never_an_orphan(
    attempts: dict[tuple[int, str], float], committed: dict[int, str], now_s: float
) -> None:
    orphans = orphaned_attempts(attempts, committed, now_s)
    for step, attempt in orphans:
        assert committed.get(step) != attempt
        assert step in committed or now_s - attempts[step, attempt] > ORPHAN_AGE_S
    for (step, attempt), written_s in attempts.items():
        if step in committed and committed[step] != attempt:
            assert (step, attempt) in orphans
        if step not in committed and now_s - written_s > ORPHAN_AGE_S:
            assert (step, attempt) in orphans
