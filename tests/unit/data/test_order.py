"""The global order: a true-looking permutation per epoch, cut exactly for any world."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flextrain.data.order import SampleOrder, cut, share
from flextrain.errors import DataError

AROUND_POWERS_OF_TWO = [(1 << power) + off for power in (2, 8, 15, 16) for off in (-1, 0, 1)]
SIZES = [4_095, 4_096, 4_097, 65_537, 1_000_003, (1 << 20) + 1, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, 3_000_000_000]


@given(n=st.integers(1, 5_000), seed=st.integers(0, 1 << 63), epoch=st.integers(0, 1 << 40))
@settings(max_examples=60, deadline=None)
def test_every_epoch_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    ids = SampleOrder(n, seed).ids(epoch * n, n)
    assert ids.dtype == np.int64
    assert np.array_equal(np.sort(ids), np.arange(n))


@pytest.mark.parametrize("n", [1, 2, 3, *AROUND_POWERS_OF_TWO])
def test_bijective_around_powers_of_two(n: int) -> None:
    assert np.array_equal(np.sort(SampleOrder(n, 3).ids(n, n)), np.arange(n))


@given(n=st.integers(1, 200), seed=st.integers(0, 99), start=st.integers(0, 900), cuts=st.lists(st.integers(0, 150)))
@settings(max_examples=60, deadline=None)
def test_any_cut_of_positions_gives_the_same_ids(n: int, seed: int, start: int, cuts: list[int]) -> None:
    order = SampleOrder(n, seed)
    whole = order.ids(start, sum(cuts))
    parts, position = [], start
    for count in cuts:
        parts.append(SampleOrder(n, seed).ids(position, count))
        position += count
    assert np.array_equal(whole, np.concatenate([np.empty(0, np.int64), *parts]))


def test_epochs_and_seeds_differ() -> None:
    orders = [SampleOrder(10_000, seed).ids(epoch * 10_000, 10_000) for seed in (0, 1) for epoch in (0, 1)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert np.mean(one == other) < 0.01


def test_the_order_never_changes() -> None:
    """Checkpoints of every version count on these numbers: positions without the order are worthless."""
    assert SampleOrder(1_000, 7).ids(998, 6).tolist() == [560, 277, 246, 156, 696, 309]
    assert SampleOrder(3_000_000_000, 7).ids(0, 3).tolist() == [1011200464, 2734054352, 369772988]


def test_an_order_over_nothing_is_a_mistake() -> None:
    with pytest.raises(DataError, match="at least one sample"):
        SampleOrder(0, 1)


def statistics(ids: np.ndarray, n: int) -> dict[str, float]:
    """What weak shuffles get wrong. Correlations are scaled to be standard normal for a true permutation."""
    root = np.sqrt(len(ids))
    parity = (ids & 1).astype(float)
    strata = np.minimum(ids.astype(np.float64) / n * 64, 63).astype(int).reshape(-1, 256)
    per_batch = np.stack([np.bincount(row, minlength=64) for row in strata])
    chi_square = ((per_batch - 4.0) ** 2 / 4.0).sum(axis=1)  # 63 degrees of freedom
    return {
        "neighbours": root * np.corrcoef(ids[:-1], ids[1:])[0, 1],
        "neighbour parity": root * np.corrcoef(parity[:-1], parity[1:])[0, 1],
        "position": root * np.corrcoef(np.arange(len(ids)), ids)[0, 1],
        "position parity": root * np.corrcoef(np.arange(len(ids)) & 1, parity)[0, 1],
        "strata per batch": (chi_square.mean() - 63) / np.sqrt(2 * 63 / len(chi_square)),
        "repeated differences": 1 - len(np.unique(np.diff(ids))) / (len(ids) - 1),
    }


@pytest.mark.parametrize("n", SIZES)
def test_statistics_are_those_of_a_true_permutation(n: int) -> None:
    count = min(n, 1 << 16) // 256 * 256
    rng = np.random.default_rng(n)
    true = rng.permutation(n)[:count] if n < 1 << 21 else rng.integers(0, n, count)  # so large that few repeat
    expected, found = statistics(true, n), statistics(SampleOrder(n, 11).ids(5 * n, count), n)
    for name, value in found.items():
        tolerance = 4 / np.sqrt(count) if name == "repeated differences" else 6.0
        assert abs(value - expected[name]) < tolerance, f"{name}: {value}, of a true permutation {expected[name]}"


def test_a_weak_mixer_fails_those_statistics() -> None:
    """The yardstick must be able to say no: a linear congruential order of the same size does not pass."""
    n = 65_537
    weak = (np.arange(1 << 16, dtype=np.int64) * 40_503 + 7) % n
    true = np.random.default_rng(0).permutation(n)[: 1 << 16]
    assert abs(statistics(weak, n)["repeated differences"] - statistics(true, n)["repeated differences"]) > 0.5
    assert abs(statistics(weak, n)["strata per batch"]) > 6.0


@given(total=st.integers(0, 10_000), size=st.integers(1, 300))
def test_shares_cover_everything_and_differ_by_one(total: int, size: int) -> None:
    shares = [share(total, rank, size) for rank in range(size)]
    assert shares[0][0] == 0
    assert shares[-1][1] == total
    assert all(one[1] == other[0] for one, other in itertools.pairwise(shares))
    lengths = [hi - lo for lo, hi in shares]
    assert max(lengths) - min(lengths) <= 1


@given(batch=st.integers(1, 600), micro=st.integers(1, 64), size=st.integers(1, 40))
def test_every_rank_cuts_its_share_into_the_same_number_of_pieces(batch: int, micro: int, size: int) -> None:
    cuts = [cut(batch, micro, rank, size) for rank in range(size)]
    largest = max(hi - lo for lo, hi in (share(batch, rank, size) for rank in range(size)))
    assert {len(pieces) for pieces in cuts} == {-(-largest // micro)}
    assert [i for pieces in cuts for lo, hi in pieces for i in range(lo, hi)] == list(range(batch))
    for rank, pieces in enumerate(cuts):
        assert (pieces[0][0], pieces[-1][1]) == share(batch, rank, size)
        lengths = [hi - lo for lo, hi in pieces]
        assert max(lengths) <= micro
        assert max(lengths) - min(lengths) <= 1


@given(
    n=st.integers(5, 400),
    batch=st.integers(1, 70),
    micro=st.integers(1, 40),
    seed=st.integers(0, 1_000),
    lives=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 15), st.integers(0, 10)), min_size=1, max_size=6),
)
@settings(max_examples=40, deadline=None)
def test_whatever_dies_and_returns_each_step_reads_the_reference(
    n: int, batch: int, micro: int, seed: int, lives: list[tuple[int, int, int]]
) -> None:
    """A life is (world size, steps until the crash, steps lost): the next one resumes before what was lost."""
    reference = SampleOrder(n, seed)
    consumed: dict[int, np.ndarray] = {}
    step = 0
    for size, steps, lost in lives:
        for current in range(step, step + steps):
            order = SampleOrder(n, seed)  # as a fresh process would make it
            pieces = [cut(batch, micro, rank, size) for rank in range(size)]
            spans = [(cuts[0][0], cuts[-1][1]) for cuts in pieces]
            ids = [order.ids(current * batch + lo, hi - lo) for lo, hi in spans]
            again = np.concatenate(ids)
            assert np.array_equal(consumed.get(current, again), again)
            consumed[current] = again
        step = max(0, step + steps - lost)
    read = np.concatenate([np.empty(0, np.int64), *(consumed[key] for key in sorted(consumed))])
    assert np.array_equal(read, reference.ids(0, len(read)))
    for epoch in range(len(read) // n):
        assert len(np.unique(read[epoch * n : (epoch + 1) * n])) == n
