"""What is resumed of all that is found in memory, on the nodes' disks and in the store."""

from hypothesis import given
from hypothesis import strategies as st

from flextrain.checkpoint.commit import Attempt
from flextrain.checkpoint.tiers import CheckpointTier, Option, options

MEMORY, NVME, S3 = CheckpointTier
SNAPSHOTS = st.sets(st.tuples(st.integers(0, 9), st.sampled_from(["a", "b"])), max_size=4)
ATTEMPTS = st.builds(Attempt, st.integers(0, 9), st.sampled_from(["a", "b"]), st.integers(1, 3))
PARTS = st.sets(st.tuples(ATTEMPTS, st.integers(0, 2)), max_size=6)


def test_the_newest_step_wins_and_of_one_step_the_nearest_tier() -> None:
    staged = [(Attempt(20, "b", 1), 0)]
    found = options([[(20, "b"), (10, "a")]], [staged], stored=[20, 30])
    assert found == [
        Option(30, S3),
        Option(20, MEMORY, "b"),
        Option(20, NVME, "b"),
        Option(20, S3),
        Option(10, MEMORY, "a"),
    ]


def test_a_snapshot_counts_where_every_rank_holds_it() -> None:
    assert options([[(1, "a"), (2, "a")], [(1, "a")]], [[], []], []) == [Option(1, MEMORY, "a")]


def test_the_same_step_of_another_attempt_is_another_state() -> None:
    assert options([[(1, "a")], [(1, "b")]], [[], []], []) == []


def test_parts_count_wherever_they_lie_once_they_are_all_there() -> None:
    whole, half = Attempt(5, "a", 2), Attempt(6, "b", 2)
    assert options([[], []], [[(whole, 1), (half, 0)], [(whole, 0)]], []) == [Option(5, NVME, "a")]


def test_a_larger_world_than_now_is_read_by_fewer_ranks() -> None:
    attempt = Attempt(5, "a", 3)
    assert options([[]], [[(attempt, rank) for rank in range(3)]], []) == [Option(5, NVME, "a")]


@given(st.lists(st.tuples(SNAPSHOTS, PARTS), min_size=1, max_size=3), st.sets(st.integers(0, 9)))
def test_nothing_is_offered_that_some_rank_would_miss(ranks: list[tuple[set, set]], stored: set[int]) -> None:  # type: ignore[type-arg]
    memory, staged = [held for held, _ in ranks], [parts for _, parts in ranks]
    found = options(memory, staged, stored)
    assert [option.step for option in found] == sorted((option.step for option in found), reverse=True)
    assert {option.step for option in found if option.tier is S3} == stored
    for option in found:
        if option.tier is MEMORY:
            assert all((option.step, option.attempt) in held for held in memory)
        if option.tier is NVME:
            sizes = {a.world_size for a, _ in set.union(*staged) if (a.step, a.name) == (option.step, option.attempt)}
            assert any(
                {(Attempt(option.step, option.attempt, size), rank) for rank in range(size)} <= set.union(*staged)
                for size in sizes
            )
