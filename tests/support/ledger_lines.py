"""Event lines as dictionaries, for tests of what is computed from them. Times here are whole milliseconds."""

from typing import Any

from flextrain.tracking import AGENT_RANK, names

Line = dict[str, Any]


class Life:
    """One incarnation of a node; collects what its agent and ranks say."""

    def __init__(self, node: int = 0, incarnation: str = "a", attempt: int = 0) -> None:
        self.identity = {"run": "run-1", "attempt": attempt, "node": node, "incarnation": incarnation}
        self.lines: list[Line] = []

    def says(self, t_ms: int, kind: str, rank: int = AGENT_RANK, **rest: Any) -> "Life":
        self.lines.append({**self.identity, "rank": rank, "t": t_ms / 1000, "kind": kind, **rest})
        return self

    def enters(self, t_ms: int, state: str, rank: int = AGENT_RANK) -> "Life":
        return self.says(t_ms, "event", rank, name=names.STATE, fields={"state": state})

    def beats(self, t_ms: int, rank: int = AGENT_RANK) -> "Life":
        return self.says(t_ms, "event", rank, name=names.BEAT, fields={})

    def steps(self, t_ms: int, step: int, tokens: float, rank: int = 0) -> "Life":
        return self.says(t_ms, "metrics", rank, step=step, metrics={names.TOKENS: tokens, names.LOSS: 1.0})

    def closes(self, t_ms: int, status: str = names.Status.FINISHED, rank: int = AGENT_RANK) -> "Life":
        return self.says(t_ms, "close", rank, status=status)
