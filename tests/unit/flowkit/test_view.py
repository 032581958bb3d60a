from typing import Any

import pytest

from flextrain.flowkit.view import RunView


def metrics(step: int, loss: Any, attempt: int = 0, seconds: float = 0.5) -> dict[str, Any]:
    values = {"train/loss": loss, "train/step_seconds": seconds, "train/tokens_per_second": 2000.0}
    return {"kind": "metrics", "rank": 0, "node": 0, "attempt": attempt, "t": step, "step": step, "metrics": values}


def event(name: str, attempt: int = 0, **fields: Any) -> dict[str, Any]:
    return {"kind": "event", "rank": 0, "node": 0, "attempt": attempt, "t": 0.0, "name": name, "fields": fields}


def agent(kind: str, node: int, t: float, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "rank": -1, "node": node, "attempt": 0, "t": t, "name": "beat", "fields": {}, **more}


def test_a_replayed_step_replaces_the_one_before() -> None:
    view = RunView().feed([metrics(1, 5.0), metrics(2, 4.0), event("resume", 1, step=1), metrics(2, 4.5, attempt=1)])
    assert view.loss == {1: 5.0, 2: 4.5}
    assert view.resumes == ["attempt 2 from step 1"]


def test_the_time_left_follows_the_median_of_recent_steps() -> None:
    steps = [metrics(step, 1.0, seconds=0.5) for step in range(1, 10)] + [metrics(10, 1.0, seconds=60.0)]
    assert RunView().feed(steps).pace() == "2k tokens/s"
    view = RunView().feed([event("plan", last_step=30), *steps])
    assert view.eta_s() == pytest.approx(10.0)
    assert view.pace() == "step 10/30, 2k tokens/s, 10.0 s left"


def test_nothing_is_promised_before_the_first_step() -> None:
    view = RunView().feed([event("plan", last_step=100)])
    assert view.eta_s() is None
    assert view.pace() == "step 0/100"


def test_a_loss_written_as_nan_is_a_number() -> None:
    assert str(RunView().feed([metrics(1, "nan")]).loss[1]) == "nan"


def test_metrics_of_the_evaluation_do_not_move_training() -> None:
    view = RunView().feed([metrics(3, 1.0), {**metrics(9, 1.0), "metrics": {"eval/loss": 2.0}}])
    assert view.step == 3


def test_checkpoints_are_listed_once() -> None:
    saved = event("checkpoint", step=50, url="u")
    assert RunView().feed([saved, saved]).checkpoints == [50]


def test_a_node_that_stopped_beating_is_called_silent() -> None:
    view = RunView().feed([agent("event", 0, 100.0), agent("event", 1, 50.0), agent("close", 2, 99.0, status="failed")])
    assert view.gang(101.0) == "node 0 running, node 1 silent for 51.0 s, node 2 failed"
