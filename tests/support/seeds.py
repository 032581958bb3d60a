"""Seeded cases: a handful in every run of the tests, all of them with `pytest -m faults`."""

from typing import Any

import pytest


def seeded(count: int, sample: int = 2) -> Any:
    """Run a test for `count` seeds and a sample. One alone: `pytest -m "" "tests/faults/test_x.py::test_y[seed17]"`."""
    rare = pytest.mark.faults
    return pytest.mark.parametrize(
        "seed",
        [pytest.param(seed, id=f"seed{seed}", marks=[rare] * (seed >= sample)) for seed in range(count + sample)],
    )
