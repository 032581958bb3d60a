"""Boxes that tile a tensor are told from all others, however they are cut and wherever they overlap."""

from itertools import product
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flextrain.checkpoint.tiling import MAX_DIMS, Tiling

Box = tuple[tuple[int, ...], tuple[int, ...]]


def cut(draw: Any, start: tuple[int, ...], shape: tuple[int, ...], depth: int) -> list[Box]:
    """A box cut in two, and its parts again: tilings that are no grid are among them."""
    sides = [dim for dim, size in enumerate(shape) if size > 1]
    if not depth or not sides:
        return [(start, shape)]
    dim = draw(st.sampled_from(sides))
    at = draw(st.integers(1, shape[dim] - 1))
    low = (*shape[:dim], at, *shape[dim + 1 :])
    high = (*shape[:dim], shape[dim] - at, *shape[dim + 1 :])
    further = (*start[:dim], start[dim] + at, *start[dim + 1 :])
    return cut(draw, start, low, depth - 1) + cut(draw, further, high, depth - 1)


@st.composite
def tilings(draw: Any) -> tuple[tuple[int, ...], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    return shape, draw(st.permutations(cut(draw, (0,) * len(shape), shape, draw(st.integers(0, 4)))))


def cells(boxes: list[Box]) -> list[tuple[int, ...]]:
    return sorted(
        cell
        for start, size in boxes
        for cell in product(*(range(low, low + count) for low, count in zip(start, size, strict=True)))
    )


@given(tilings())
def test_every_tiling_is_exact(tiling: tuple[tuple[int, ...], list[Box]]) -> None:
    assert Tiling().is_exact(*tiling)


@given(tilings(), st.data())
def test_one_box_changed_shows_unless_it_covers_the_same_cells(
    tiling: tuple[tuple[int, ...], list[Box]], data: Any
) -> None:
    shape, boxes = tiling
    which = data.draw(st.integers(0, len(boxes) - 1))
    start, size = boxes[which]
    moved = tuple(a + data.draw(st.integers(-2, 2)) for a in start)
    other = tuple(max(0, n + data.draw(st.integers(-1, 1))) for n in size)
    how = data.draw(st.sampled_from(["moved", "drop", "double"]))
    replaced = {"moved": [(moved, other)], "drop": [], "double": [boxes[which]] * 2}[how]
    changed = [*boxes[:which], *replaced, *boxes[which + 1 :]]
    assert Tiling().is_exact(shape, changed) == (cells(changed) == cells([((0,) * len(shape), shape)]))


def test_as_many_dims_as_there_may_be() -> None:
    shape = (2,) * MAX_DIMS
    halves = [((side, *[0] * (MAX_DIMS - 1)), (1, *shape[1:])) for side in (0, 1)]
    assert Tiling().is_exact(shape, halves)
    assert not Tiling().is_exact(shape, halves[:1])
