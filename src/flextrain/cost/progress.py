"""What the paid time yielded: optimizer steps and tokens, each counted once however often they were redone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flextrain.tracking.names import TOKENS


@dataclass(frozen=True)
class Progress:
    """`steps` distinct optimizer steps over `tokens` counted tokens; `replayed_steps` more were done again."""

    steps: int = 0
    tokens: int = 0
    replayed_steps: int = 0


class ProgressReader:
    """Counts steps from metrics lines. Every rank may record the whole batch's figures: the first that is read counts;
    of a step that was replayed, the last attempt's tokens do."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[str, int, int], int] = {}

    def add(self, event: Mapping[str, Any]) -> None:
        if event["kind"] == "metrics" and TOKENS in event["metrics"]:
            key = (event["run"], event["step"], event["attempt"])
            self._tokens.setdefault(key, round(event["metrics"][TOKENS]))

    def progress(self) -> Progress:
        latest = {(run, step): self._tokens[run, step, attempt] for run, step, attempt in sorted(self._tokens)}
        return Progress(len(latest), sum(latest.values()), len(self._tokens) - len(latest))
