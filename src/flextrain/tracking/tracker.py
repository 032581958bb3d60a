"""What a run reports to: four methods, and a composite that outlives its children."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flextrain.log import get_logger

AGENT_RANK = -1  # the agent of a node writes events too, but is no rank
logger = get_logger("tracking")


@dataclass(frozen=True)
class RunInfo:
    """Who writes: process `rank` (AGENT_RANK for an agent) on `node`, in one life (`incarnation`) of that node.

    All processes of a node's life share its incarnation: node-seconds are paid once per (node, incarnation).
    """

    experiment: str
    run_id: str
    attempt: int
    rank: int
    node: int
    incarnation: str
    config: dict[str, Any] = field(default_factory=dict)


class Tracker(Protocol):
    """Receives what happens. Calls come in this order: start, any number of log and event, close."""

    def start(self, run: RunInfo) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of one optimizer step; the same step comes again where it is replayed. Keys are from `names`."""

    def event(self, name: str, /, **fields: Any) -> None:
        """Something that happened now. Names are from `names`; fields must fit into JSON."""

    def close(self, status: str) -> None:
        """`status` is a names.Status."""


class CompositeTracker:
    """Passes every call to all children. A child that raises is warned about once, left out from then on, and
    stops nothing: losing a curve must not lose a run."""

    def __init__(self, children: Sequence[Tracker]) -> None:
        self._children = list(children)

    def start(self, run: RunInfo) -> None:
        self._tell(lambda child: child.start(run))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._tell(lambda child: child.log(step, metrics))

    def event(self, name: str, /, **fields: Any) -> None:
        self._tell(lambda child: child.event(name, **fields))

    def close(self, status: str) -> None:
        self._tell(lambda child: child.close(status))

    def _tell(self, call: Callable[[Tracker], None]) -> None:
        for child in self._children[:]:
            try:
                call(child)
            except Exception as error:
                self._children = [other for other in self._children if other is not child]
                logger.warning("%s failed and is left out from now on: %s", type(child).__name__, error)
