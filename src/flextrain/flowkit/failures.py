"""Users' mistakes inside a flow: shown as a block without a traceback, and not retried where a retry cannot help."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from metaflow.exception import METAFLOW_EXIT_DISALLOW_RETRY, MetaflowException

from flextrain.errors import CheckpointMismatch, ConfigError, CostError, DataError, FlextrainError, ModelError

P = ParamSpec("P")
R = TypeVar("R")

# The same inputs give the same answer, so `@retry` would only print it again. Storage and gang errors may pass.
PERMANENT = (ConfigError, DataError, ModelError, CheckpointMismatch, CostError)


class FlowError(MetaflowException):  # type: ignore[misc]
    """A FlextrainError as Metaflow shows its own: headline and text."""

    headline = "flextrain"

    def __init__(self, error: FlextrainError) -> None:
        super().__init__(error.render())


def plain_errors(body: Callable[P, R]) -> Callable[P, R]:
    """A step body whose FlextrainErrors become FlowErrors; any other exception keeps its traceback."""

    @functools.wraps(body)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return body(*args, **kwargs)
        except FlextrainError as error:
            raise FlowError(error) from None

    return wrapped


def not_retried(body: Callable[P, R]) -> Callable[P, R]:
    """The same for a step under `@retry`: what no retry can mend is printed and ends the run at once."""

    @functools.wraps(body)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return body(*args, **kwargs)
        except PERMANENT as error:
            print(error.render(), file=sys.stderr, flush=True)
            sys.exit(METAFLOW_EXIT_DISALLOW_RETRY)

    return wrapped
