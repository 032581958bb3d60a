"""Which checkpoints go: properties over all histories."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flextrain.checkpoint.generation import Standing, generation_of
from flextrain.checkpoint.retention import ORPHAN_AGE_S, Keep, numbers, orphaned_attempts, steps_to_delete
from flextrain.errors import CheckpointError

METRICS = st.none() | st.integers(-3, 3).map(float) | st.floats()  # many equal ones, and NaN
COMMITTED = st.dictionaries(st.integers(0, 60), METRICS, max_size=25)
KEEPS = st.builds(
    Keep,
    last_n=st.integers(1, 6),
    every=st.none() | st.integers(1, 9),
    best_n=st.integers(0, 5),
    mode=st.sampled_from(["min", "max"]),
)


def kept(committed: dict[int, float | None], keep: Keep) -> set[int]:
    gone = steps_to_delete(committed, keep)
    assert gone == sorted(set(gone))
    assert set(gone) <= set(committed)
    return set(committed) - set(gone)


@given(COMMITTED, st.integers(1, 10))
def test_the_newest_n_alone_stay_where_nothing_else_is_asked_for(committed: dict[int, float | None], n: int) -> None:
    assert kept(committed, Keep(n)) == set(sorted(committed)[-n:])


@given(COMMITTED, KEEPS)
def test_what_any_of_the_three_rules_speaks_for_stays_and_nothing_else(
    committed: dict[int, float | None], keep: Keep
) -> None:
    stay = kept(committed, keep)
    newest = set(sorted(committed)[-keep.last_n :])
    multiples = {step for step in committed if keep.every and step % keep.every == 0}
    best = stay - newest - multiples
    comparable = {step: m for step, m in committed.items() if m is not None and math.isfinite(m)}
    assert newest | multiples <= stay
    assert best <= comparable.keys()
    assert len(best) <= keep.best_n
    if keep.best_n and comparable:
        top = (min if keep.mode == "min" else max)(comparable.values())
        assert max(step for step, metric in comparable.items() if metric == top) in stay
    worse = [comparable[step] for step in comparable if step not in stay]
    for step in best:
        assert all(comparable[step] <= m if keep.mode == "min" else comparable[step] >= m for m in worse)
    assert len(stay & comparable.keys()) >= min(keep.best_n, len(comparable))


@given(COMMITTED, KEEPS, st.integers(0, 3), st.integers(0, 3))
def test_asking_for_more_never_deletes_more(committed: dict[int, float | None], keep: Keep, n: int, best: int) -> None:
    more = Keep(keep.last_n + n, keep.every, keep.best_n + best, keep.metric, keep.mode)
    assert kept(committed, keep) <= kept(committed, more)
    assert kept(committed, Keep(keep.last_n, None, keep.best_n, mode=keep.mode)) <= kept(committed, keep)


@given(COMMITTED, KEEPS)
def test_deciding_at_every_save_keeps_what_one_decision_at_the_end_would(
    committed: dict[int, float | None], keep: Keep
) -> None:
    there: dict[int, float | None] = {}
    for step in sorted(committed):
        there[step] = committed[step]
        there = {step: there[step] for step in kept(there, keep)}
        assert step in there, "the newest is gone"
        assert steps_to_delete(there, keep) == []
    assert set(there) == kept(committed, keep)


def test_of_equals_the_later_is_better() -> None:
    assert kept({1: 2.0, 2: 2.0, 3: 5.0}, Keep(1, best_n=1)) == {2, 3}


def test_a_metric_must_be_a_number_of_the_state() -> None:
    state = {"loss": 1.5, "tokens": 7, "wait": True, "data": {"seed": 0}, "note": "x"}
    assert numbers(state) == {"loss": 1.5, "tokens": 7}
    Keep(1, best_n=1, metric="tokens").check(state)
    Keep(1, metric="nothing").check(state)
    with pytest.raises(CheckpointError, match=r"'los'[^→]*→ the numbers there are: loss, tokens"):
        Keep(1, best_n=1, metric="los").check(state)


NAMES = st.sampled_from(["a", "b", "g00000001-a", "g00000002-a", "g00000002-b", "g00000003-a"])
ATTEMPTS = st.dictionaries(st.tuples(st.integers(0, 5), NAMES), st.floats(0, 10_000))
STANDINGS = st.none() | st.builds(Standing, st.integers(1, 3), st.none() | st.floats(0, 20_000))


@given(ATTEMPTS, st.dictionaries(st.integers(0, 5), st.none() | NAMES), st.floats(0, 20_000), STANDINGS)
def test_an_attempt_is_an_orphan_exactly_when_it_cannot_be_committed_any_more(
    attempts: dict[tuple[int, str], float], committed: dict[int, str | None], now_s: float, newest: Standing | None
) -> None:
    orphans = orphaned_attempts(attempts, committed, now_s, newest)
    assert orphans == sorted(set(orphans))
    assert set(orphans) <= set(attempts)
    for (step, attempt), written_s in attempts.items():
        dead = (step, attempt) in orphans
        own = generation_of(attempt)
        if committed.get(step) is not None:
            assert dead == (attempt != committed[step])
        elif step in committed or own is None or newest is None or own > newest.number:
            assert dead == (now_s - written_s > ORPHAN_AGE_S)
        elif own < newest.number:
            assert dead
        else:
            assert dead == (now_s - written_s > ORPHAN_AGE_S and not newest.is_live(now_s))


@given(ATTEMPTS, st.floats(0, 20_000), STANDINGS)
def test_a_lease_only_ever_protects(attempts: dict[tuple[int, str], float], now_s: float, newest: Standing) -> None:
    live = Standing(newest.number if newest else 3, now_s)
    silent = Standing(live.number)
    assert set(orphaned_attempts(attempts, {}, now_s, live)) <= set(orphaned_attempts(attempts, {}, now_s, silent))
