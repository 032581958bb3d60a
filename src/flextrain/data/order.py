"""The global order of samples: a pure function of (seed, position), so that resuming needs one number of state.

Positions count samples since the start of training; epoch e is positions [e·n, (e+1)·n), a fresh permutation each.
Optimizer step s of global batch G owns positions [sG, (s+1)G), and rank r of W takes its `share` of them: what is read
never depends on W. The permutation is a balanced Feistel network of murmur-style rounds with cycle-walking (Black and
Rogaway 2002, "Ciphers with arbitrary finite domains"). Fewer rounds or cheaper mixers show up in neighbour statistics.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from flextrain.errors import DataError

ROUNDS = 6
_U32 = np.uint64(0xFFFFFFFF)
_MULTIPLIER_A, _MULTIPLIER_B = np.uint64(0x9E3779B1), np.uint64(0x85EBCA6B)
_SHIFT_A, _SHIFT_B = np.uint64(15), np.uint64(13)

Ids = npt.NDArray[np.int64]
_Lanes = npt.NDArray[np.uint64]


class SampleOrder:
    """Sample ids by position, for `num_samples` samples and a seed. Equal arguments give equal orders everywhere."""

    def __init__(self, num_samples: int, seed: int) -> None:
        """Raises DataError for fewer than one sample; `seed` is taken modulo 2**64."""
        if num_samples < 1:
            raise DataError("an order needs at least one sample", number=23, remedy="give a dataset that is not empty")
        assert num_samples < 1 << 62, "halves must fit the 32-bit mixer"
        self.num_samples = num_samples
        self.seed = seed % (1 << 64)
        half_bits = max(1, ((num_samples - 1).bit_length() + 1) // 2)
        self._half_bits = np.uint64(half_bits)
        self._half_mask = np.uint64((1 << half_bits) - 1)

    def __repr__(self) -> str:
        return f"SampleOrder(num_samples={self.num_samples}, seed={self.seed})"

    def ids(self, position: int, count: int) -> Ids:
        """Ids of positions [position, position + count), over as many epochs as that spans; int64, shape (count,)."""
        assert position >= 0 <= count, "positions count from 0"
        pieces: list[Ids] = []
        end = position + count
        while position < end:
            epoch, offset = divmod(position, self.num_samples)
            size = min(end - position, self.num_samples - offset)
            pieces.append(self._permute(epoch, np.arange(offset, offset + size, dtype=np.uint64)))
            position += size
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def _permute(self, epoch: int, x: _Lanes) -> Ids:
        keys = _round_keys(self.seed, epoch)
        x = self._feistel(x, keys)
        outside = np.flatnonzero(x >= self.num_samples)
        while (
            outside.size
        ):  # walk the cycle until it re-enters the range: still a bijection, 4 turns at worst on average
            x[outside] = self._feistel(x[outside], keys)
            outside = outside[x[outside] >= self.num_samples]
        return x.astype(np.int64)

    def _feistel(self, x: _Lanes, keys: _Lanes) -> _Lanes:
        left, right = x >> self._half_bits, x & self._half_mask
        for key in keys:
            left, right = right, left ^ (_mix(right, key) & self._half_mask)
        return (left << self._half_bits) | right


@lru_cache(maxsize=16)
def _round_keys(seed: int, epoch: int) -> _Lanes:
    """Philox is counter-based and stable across numpy versions, so an order can be repeated years later."""
    raw: Any = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(ROUNDS)
    keys: _Lanes = raw & _U32
    return keys


def _mix(x: _Lanes, key: np.uint64) -> _Lanes:
    """Murmur's finaliser on 32 bits, carried in 64-bit lanes so that products do not overflow."""
    x = ((x ^ key) * _MULTIPLIER_A) & _U32
    x ^= x >> _SHIFT_A
    x = (x * _MULTIPLIER_B) & _U32
    x ^= x >> _SHIFT_B
    return x


def share(total: int, rank: int, size: int) -> tuple[int, int]:
    """The part [lo, hi) of `total` things that rank of size takes; parts differ by at most one and cover everything."""
    return rank * total // size, (rank + 1) * total // size


def cut(global_batch: int, micro_batch: int, rank: int, size: int) -> list[tuple[int, int]]:
    """This rank's micro-batches as offsets [lo, hi) in the step's global batch, each of at most `micro_batch` samples.

    Every rank gets the same number of pieces, because every piece is a round of collectives; pieces of one rank differ
    by at most one sample, and a piece is empty (lo == hi) where a rank has fewer samples than there are pieces.
    """
    largest_share = -(-global_batch // size)
    pieces = -(-largest_share // micro_batch)
    lo, hi = share(global_batch, rank, size)
    bounds = [share(hi - lo, piece, pieces) for piece in range(pieces)]
    return [(lo + start, lo + end) for start, end in bounds]
