"""One split's tokens as a single array, over shards that are mapped into memory and read where they lie."""

import bisect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[Any]  # uint16 or uint32


class TokenArray:
    """Concatenated shards without the copy. Every shard but the last has the same length."""

    def __init__(self, shards: Sequence[Tokens]) -> None:
        self.shards = list(shards)
        self._starts = np.cumsum([0, *map(len, self.shards)])
        self._views: dict[tuple[int, int], Tokens] = {}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __iter__(self) -> Iterator[int]:
        for shard in self.shards:
            yield from shard.tolist()

    def __getitem__(self, key: int | slice) -> Any:
        """One token, or a contiguous slice as an array."""
        if isinstance(key, slice):
            start, stop, stride = key.indices(len(self))
            return self.window(start, max(0, stop - start))[::stride] if stride > 0 else self.window(0, len(self))[key]
        position = range(len(self))[key]
        return int(self.window(position, 1)[0])

    def window(self, start: int, length: int) -> Tokens:
        """Tokens [start, start + length): a view inside one shard, a copy across borders. Raises IndexError."""
        if not 0 <= start <= start + length <= len(self):
            raise IndexError(f"tokens {start} to {start + length} of {len(self)}")
        number = self._shard_of(start)
        offset = start - int(self._starts[number])
        if offset + length <= len(self.shards[number]):
            return self.shards[number][offset : offset + length]
        head = self.shards[number][offset:]
        return np.concatenate([head, self.window(start + len(head), length - len(head))])

    def gather(self, starts: npt.ArrayLike, length: int) -> npt.NDArray[np.int64]:
        """Windows of `length` tokens at `starts`; int64, shape (len(starts), length). Raises IndexError."""
        at = np.asarray(starts, dtype=np.int64)
        if at.size and (at.min() < 0 or at.max() + length > len(self)):
            raise IndexError(f"windows of {length} from {at.min()} to {at.max()} of {len(self)} tokens")
        if len(self.shards) == 1:
            return self._windows(0, length)[at].astype(np.int64)
        out = np.empty((len(at), length), np.int64)
        numbers = np.searchsorted(self._starts, at, side="right") - 1
        inside = at + length <= self._starts[numbers + 1]
        for number in np.unique(numbers[inside]):
            rows = np.flatnonzero(inside & (numbers == number))
            out[rows] = self._windows(int(number), length)[at[rows] - self._starts[number]]
        for row in np.flatnonzero(~inside):
            out[row] = self.window(int(at[row]), length)
        return out

    def _shard_of(self, position: int) -> int:
        return min(bisect.bisect_right(self._starts, position) - 1, len(self.shards) - 1)

    def _windows(self, number: int, length: int) -> Tokens:
        """All windows of a shard as a strided view, kept because making one costs more than reading a few rows."""
        key = (number, length)
        if key not in self._views:
            self._views[key] = np.lib.stride_tricks.sliding_window_view(self.shards[number], length)
        return self._views[key]
