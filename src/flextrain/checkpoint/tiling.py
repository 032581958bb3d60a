"""Whether boxes tile a tensor, without gap or overlap: in time linear in their number, however they are arranged.

Every cell of a tensor is given a random weight: a product, modulo a prime, of one factor per dimension, each of which
is a difference P(i + 1) - P(i) of a random function P of that dimension's indices. A box then weighs the product of
P(stop) - P(start), and boxes that weigh together what the tensor weighs cover each of its cells once and no other:
else a polynomial that is not zero would vanish at a random point, which happens with a chance of dims / PRIME < 1e-16
(J. T. Schwartz, "Fast Probabilistic Algorithms for Verification of Polynomial Identities", 1980). The functions are
drawn anew for every manifest, so nobody can write one that this overlooks.
"""

import random
from collections import defaultdict
from collections.abc import Iterable

PRIME = (1 << 61) - 1
MAX_DIMS = 64


class Tiling:
    """Weighs boxes; one for all the tensors of a manifest."""

    def __init__(self) -> None:
        draw = random.SystemRandom()
        self._at = [defaultdict[int, int](lambda: draw.randrange(PRIME)) for _ in range(MAX_DIMS)]

    def is_exact(self, shape: tuple[int, ...], boxes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
        """Whether boxes, (start, shape) each, tile a tensor of `shape`, which has MAX_DIMS dims at most. Empty ones
        weigh nothing, wherever they are; sizes must not be negative."""
        if len(shape) > MAX_DIMS:
            return False
        found = sum(self._weight(start, size) for start, size in boxes)
        return (found - self._weight((0,) * len(shape), shape)) % PRIME == 0

    def _weight(self, start: tuple[int, ...], size: tuple[int, ...]) -> int:
        weight = 1
        for at, low, count in zip(self._at, start, size, strict=False):
            weight = weight * (at[low + count] - at[low]) % PRIME
        return weight
