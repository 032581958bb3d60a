"""A tracker that fails is warned about once and stops nothing."""

import logging
from collections.abc import Mapping
from typing import Any

import pytest

from flextrain.tracking import CompositeTracker, RunInfo, names

RUN = RunInfo("exp", "run-1", 0, 0, 0, "abc")


class Recorder:
    """Keeps the calls it got; raises in the call named `fails_in`."""

    def __init__(self, fails_in: str = "") -> None:
        self.fails_in = fails_in
        self.calls: list[tuple[Any, ...]] = []

    def _record(self, *call: Any) -> None:
        if call[0] == self.fails_in:
            raise OSError("no space left on device")
        self.calls.append(call)

    def start(self, run: RunInfo) -> None:
        self._record("start", run)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._record("log", step, metrics)

    def event(self, name: str, /, **fields: Any) -> None:
        self._record("event", name, fields)

    def close(self, status: str) -> None:
        self._record("close", status)


def run_through(tracker: CompositeTracker) -> None:
    tracker.start(RUN)
    tracker.log(1, {names.LOSS: 2.0})
    tracker.event(names.STATE, state="useful", name="a field called name")
    tracker.log(2, {names.LOSS: 1.0})
    tracker.close(names.Status.FINISHED)


ALL_CALLS = [
    ("start", RUN),
    ("log", 1, {names.LOSS: 2.0}),
    ("event", names.STATE, {"state": "useful", "name": "a field called name"}),
    ("log", 2, {names.LOSS: 1.0}),
    ("close", names.Status.FINISHED),
]


@pytest.mark.parametrize("fails_in", ["start", "log", "event", "close"])
def test_a_child_that_raises_is_left_out_after_one_warning(fails_in: str, caplog: pytest.LogCaptureFixture) -> None:
    before, broken, after = Recorder(), Recorder(fails_in), Recorder()
    with caplog.at_level(logging.WARNING, logger="flextrain"):
        run_through(CompositeTracker([before, broken, after]))
    assert before.calls == after.calls == ALL_CALLS
    assert broken.calls == ALL_CALLS[: [call[0] for call in ALL_CALLS].index(fails_in)]
    assert [record.getMessage() for record in caplog.records] == [
        "Recorder failed and is left out from now on: no space left on device"
    ]


def test_an_interrupt_is_not_a_failure_of_the_tracker() -> None:
    class Interrupted(Recorder):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            raise KeyboardInterrupt

    tracker = CompositeTracker([Interrupted()])
    with pytest.raises(KeyboardInterrupt):
        tracker.log(1, {})


def test_names_are_unique() -> None:
    texts = [text for key, text in vars(names).items() if key.isupper()]
    assert len(texts) == len(set(texts)) > 10
