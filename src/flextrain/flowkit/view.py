"""A run as its card shows it, built up event by event."""

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flextrain.tracking import names
from flextrain.units import format_count, format_seconds

RECENT_STEPS = 50
SILENT_S = 10.0  # agents beat once a second


@dataclass
class RunView:
    """What the events of rank 0 and of the agents say, over all attempts. A step done again replaces the one before."""

    loss: dict[int, float] = field(default_factory=dict)
    checkpoints: list[int] = field(default_factory=list)
    resumes: list[str] = field(default_factory=list)
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    tokens_per_second: float = 0.0
    step: int = 0
    last_step: int | None = None
    nodes: dict[int, tuple[float, str]] = field(default_factory=dict)  # node -> when last heard of, status

    def feed(self, events: Iterable[Mapping[str, Any]]) -> "RunView":
        for event in events:
            if event["kind"] == "metrics" and names.LOSS in event["metrics"]:
                self._metrics(event["step"], event["metrics"])
            elif event["kind"] == "event":
                self._event(event["name"], event["fields"], event["attempt"])
            if event["rank"] < 0:
                self._node(event)
        return self

    def _metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step = step
        self.loss[step] = float(metrics[names.LOSS])
        self.step_seconds.append(metrics[names.STEP_SECONDS])
        self.tokens_per_second = metrics[names.TOKENS_PER_SECOND]

    def _event(self, name: str, fields: Mapping[str, Any], attempt: int) -> None:
        if name == names.CHECKPOINT and fields["step"] not in self.checkpoints:
            self.checkpoints.append(fields["step"])
        elif name == names.RESUME:
            self.step = fields["step"]
            self.resumes.append(f"attempt {attempt + 1} from step {fields['step']}")
        elif name == names.PLAN:
            self.last_step = fields["last_step"]

    def _node(self, event: Mapping[str, Any]) -> None:
        if event["t"] >= self.nodes.get(event["node"], (0.0, ""))[0]:
            self.nodes[event["node"]] = (event["t"], event.get("status", "running"))

    def gang(self, now_s: float) -> str:
        """`node 0 running, node 1 silent for 0:42`; `now_s` is in unix seconds."""
        return ", ".join(f"node {node} {_status(*self.nodes[node], now_s)}" for node in sorted(self.nodes))

    @property
    def percent(self) -> int:
        return round(100 * self.step / self.last_step) if self.last_step else 0

    def eta_s(self) -> float | None:
        """Seconds to go at the pace of recent steps; None before the first."""
        if not self.step_seconds or not self.last_step:
            return None
        return max(0, self.last_step - self.step) * statistics.median(self.step_seconds)

    def pace(self) -> str:
        """`step 40/150, 12.3k tokens/s, 1:05 left`."""
        eta_s = self.eta_s()
        parts = [f"step {self.step}/{self.last_step}"] if self.last_step else []
        parts += [f"{format_count(self.tokens_per_second)} tokens/s"] if self.tokens_per_second else []
        parts += [f"{format_seconds(eta_s)} left"] if eta_s else []
        return ", ".join(parts)


def _status(heard_s: float, status: str, now_s: float) -> str:
    silent_s = now_s - heard_s
    return f"silent for {format_seconds(silent_s)}" if status == "running" and silent_s > SILENT_S else status
