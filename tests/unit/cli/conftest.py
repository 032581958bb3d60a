"""Commands set up logging for their process; a test process has others to think of."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    logger = logging.getLogger("flextrain")
    before = logger.handlers[:], logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate, logger.level = before
