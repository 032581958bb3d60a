"""The plan of who reads what for whom: everyone gets what somebody reaches, the store is asked once, work is shared."""

from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flextrain.checkpoint.handover import Situation, plan, spans

NAMES = ["a/rank-00000.bin", "a/rank-00001.bin", "a/rank-00002.bin"]
reachable = st.frozensets(st.sampled_from(NAMES))
wants = st.dictionaries(st.sampled_from(NAMES), st.sets(st.integers(0, 6), min_size=1).map(lambda s: spans(sorted(s))))
situations = st.lists(st.builds(Situation, wants, reachable, reachable), min_size=1, max_size=6)


def chunks(situation: Situation) -> set[tuple[str, int]]:
    return {(name, i) for name, found in situation.wants.items() for a, b in found for i in range(a, b)}


@given(situations)
def test_everyone_gets_what_anybody_reaches_and_no_store_is_asked_twice(ranks: list[Situation]) -> None:
    handovers = plan(ranks)
    assert len({one.chunk for one in handovers}) == len(handovers)
    comes = {(rank, one.chunk): one.reader for one in handovers for rank in one.receivers}
    from_store: dict[Any, int] = {}
    for one in handovers:
        name = one.chunk[0]
        assert name in ranks[one.reader].near | ranks[one.reader].far
        assert one.receivers
        assert one.reader not in one.receivers
        from_store[one.chunk] = name not in ranks[one.reader].near
    for rank, situation in enumerate(ranks):
        for chunk in chunks(situation):
            name = chunk[0]
            reads = (rank, chunk) not in comes
            assert not (name in situation.near and not reads), "it has that itself"
            if reads and name not in situation.near and name in situation.far:
                readers = [one.reader for one in handovers if one.chunk == chunk]
                assert readers in ([], [rank])
                from_store[chunk] = from_store.get(chunk, 0) + (not readers)
            elif reads and name not in situation.near:
                assert not any(name in one.near | one.far for one in ranks)
    for chunk, count in from_store.items():
        assert count <= 1
        assert not count or not any(chunk[0] in one.near for one in ranks), "some rank's machine has it"


@given(st.integers(2, 9), st.integers(1, 40))
def test_readers_read_about_as_much(size: int, count: int) -> None:
    handovers = plan([Situation({NAMES[0]: [(0, count)]}, far=frozenset(NAMES))] * size)
    assert len(handovers) == count
    loads = [sum(one.reader == rank for one in handovers) for rank in range(size)]
    assert max(loads) - min(loads) <= 1


@given(st.sets(st.integers(0, 50)))
def test_spans_are_the_numbers_again(numbers: set[int]) -> None:
    found = spans(sorted(numbers))
    assert [i for first, past in found for i in range(first, past)] == sorted(numbers)
    assert all(past < first for (_, past), (first, _) in pairwise(found))
