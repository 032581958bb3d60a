"""The ledger: what each node's paid time went to, read from the events that the run itself appended.

One life of a node, its incarnation, is paid from its first line to its last, whoever wrote them; so a node that was
killed ends at its last beat. Its states are told by its agent and by the first of its ranks, merged by time. Two
lives that overlap are two machines, and both are paid. Every incarnation's time is cut into states without gap or
overlap, in whole microseconds, so the states of a ledger sum to what was paid exactly. That holds for any input:

- a line that comes twice counts once, and a missing one only blurs the border between two states;
- a clock set back stands still until it has caught up, so no state is negative and no second is paid twice;
- time before the first state line belongs to that first state; unknown states, and time after `close`, are idle.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

from flextrain.tracking import AGENT_RANK
from flextrain.tracking.names import STATE, State, Status

OWN_STEPS = (State.INDEX, State.EVAL)  # steps of a pipeline beside training


@dataclass(frozen=True)
class Span:
    """A stretch of one state; microseconds of the unix clock."""

    state: State
    begin_us: int
    end_us: int

    @property
    def us(self) -> int:
        return self.end_us - self.begin_us


@dataclass(frozen=True)
class Incarnation:
    """One life of a node: adjoining spans, and the status its writers closed with (None: it was killed)."""

    run: str
    node: int
    name: str
    attempt: int
    spans: tuple[Span, ...]
    status: str | None

    @property
    def trains(self) -> bool:
        return any(span.state not in OWN_STEPS for span in self.spans)


@dataclass(frozen=True)
class Ledger:
    """All lives of all nodes of a run."""

    incarnations: tuple[Incarnation, ...]

    @property
    def us_by_state(self) -> dict[State, int]:
        """Node-microseconds of every state."""
        total = dict.fromkeys(State, 0)
        for incarnation in self.incarnations:
            for span in incarnation.spans:
                total[span.state] += span.us
        return total

    @property
    def paid_us(self) -> int:
        """Node-microseconds paid: from the first to the last line of each incarnation."""
        return sum(life.spans[-1].end_us - life.spans[0].begin_us for life in self.incarnations if life.spans)

    @property
    def startup_us(self) -> int:
        """The part of RESTART that an undisturbed run has too: the beginning of each life in the first attempt."""
        training = [life for life in self.incarnations if life.trains]
        first = min((life.attempt for life in training), default=0)
        opening = [life.spans[0] for life in training if life.attempt == first]
        return sum(span.us for span in opening if span.state is State.RESTART)

    @property
    def attempts(self) -> int:
        """How often training was started."""
        return len({life.attempt for life in self.incarnations if life.trains})

    @property
    def interruptions(self) -> int:
        """Attempts at training in which some node was killed or failed. Nodes lost together are one interruption."""
        lives = [life for life in self.incarnations if life.trains]
        return len({life.attempt for life in lives if life.status != Status.FINISHED})

    @property
    def killed(self) -> int:
        """Incarnations that ended without a close line."""
        return sum(life.status is None for life in self.incarnations)


def read_ledger(events: Iterable[Mapping[str, Any]]) -> Ledger:
    """The ledger of some events (as `tracking.read_events` gives them), lines of each writer in its own order."""
    reader = LedgerReader()
    for event in events:
        reader.add(event)
    return reader.ledger()


@dataclass
class _Writer:
    """What one process said: when it spoke first and last, and its changes of state, on its own clamped clock."""

    attempt: int
    first_us: int
    last_us: int
    changes: list[tuple[int, State]] = field(default_factory=list)
    status: str | None = None
    _seen: set[tuple[float, str, State | None]] = field(default_factory=set)

    def hear(self, event: Mapping[str, Any]) -> None:
        self.last_us = max(self.last_us, _micros(event))
        kind, state = event["kind"], _state_of(event)
        if (kind != "start" and state is None) or (event["t"], kind, state) in self._seen:
            return
        self._seen.add((event["t"], kind, state))
        self.status = event.get("status")  # a process that goes on with the file of another opens it again
        if state is not None:
            self.changes.append((self.last_us, state))


class LedgerReader:
    """Builds a ledger line by line; holds changes of state only, so that a long run's events need not fit in memory."""

    def __init__(self) -> None:
        self._lives: dict[tuple[str, int, str], dict[int, _Writer]] = {}

    def add(self, event: Mapping[str, Any]) -> None:
        life = self._lives.setdefault((event["run"], event["node"], event["incarnation"]), {})
        now_us = _micros(event)
        writer = life.setdefault(event["rank"], _Writer(event["attempt"], now_us, now_us))
        writer.hear(event)

    def ledger(self) -> Ledger:
        return Ledger(tuple(_incarnation(*key, writers) for key, writers in sorted(self._lives.items())))


def _incarnation(run: str, node: int, name: str, writers: Mapping[int, _Writer]) -> Incarnation:
    ranks = sorted(rank for rank in writers if rank != AGENT_RANK)
    speakers = [writers[rank] for rank in [AGENT_RANK, *ranks[:1]] if rank in writers]
    begin_us = min(writer.first_us for writer in writers.values())
    end_us = max(writer.last_us for writer in writers.values())
    changes = sorted((change for writer in speakers for change in writer.changes), key=lambda change: change[0])
    spans = tuple(_spans(changes, begin_us, end_us))
    return Incarnation(run, node, name, speakers[0].attempt, spans, speakers[0].status)


def _spans(changes: list[tuple[int, State]], begin_us: int, end_us: int) -> Iterable[Span]:
    """Spans from the first line to the last; those of no length are left out and equal neighbours made one."""
    states = [changes[0][1] if changes else State.IDLE, *(state for _, state in changes)]
    times = [begin_us, *(at_us for at_us, _ in changes), end_us]
    stretches = [Span(state, *ends) for state, ends in zip(states, pairwise(times), strict=True)]
    for state, group in groupby((span for span in stretches if span.us), key=lambda span: span.state):
        same = list(group)
        yield Span(state, same[0].begin_us, same[-1].end_us)


def _state_of(event: Mapping[str, Any]) -> State | None:
    if event["kind"] == "close":
        return State.IDLE
    if event["kind"] != "event" or event["name"] != STATE:
        return None
    try:
        return State(event["fields"].get("state"))
    except ValueError:
        return State.IDLE


def _micros(event: Mapping[str, Any]) -> int:
    unix_s: float = event["t"]
    return round(unix_s * 1e6)
