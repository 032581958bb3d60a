import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from flextrain.cli import steps
from flextrain.config import Config
from flextrain.cost import build_report
from flextrain.flowkit.failures import FlowError
from flextrain.tracking import read_events


@pytest.fixture
def _in_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "current", SimpleNamespace(run_id="17", retry_count=0))


def test_the_flows_config_is_every_key_of_the_configuration() -> None:
    values = steps.read_config("training: {max_steps: 7}")
    assert values["training"]["max_steps"] == 7
    assert Config.model_validate(json.loads(json.dumps(values))).training.max_steps == 7


def test_a_mistake_in_it_names_the_file_that_metaflow_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train_flow.py", "--config", "config", "my.yaml", "run"])
    with pytest.raises(FlowError) as caught:
        steps.read_config("training: {max_stps: 7}")
    assert "my.yaml:1:12" in caught.value.message
    monkeypatch.setattr("sys.argv", ["train_flow.py", "run"])
    with pytest.raises(FlowError) as caught:
        steps.read_config("training: {max_stps: 7}")
    assert "config:1:12" in caught.value.message


@pytest.mark.usefixtures("_in_a_task")
def test_time_spent_in_a_step_lands_in_the_runs_ledger(tmp_path: Path) -> None:
    with steps.node_time(Config(), f"{tmp_path}/17", "index"):
        pass
    report = build_report(Config().cost, read_events(tmp_path / "17" / "events"))
    assert report.node_us["index"] == report.paid_us > 0


@pytest.mark.usefixtures("_in_a_task")
def test_time_spent_in_a_step_that_fails_is_paid_as_well(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), steps.node_time(Config(), f"{tmp_path}/17", "eval"):
        raise ZeroDivisionError
    closed = [event for event in read_events(tmp_path / "17" / "events") if event["kind"] == "close"]
    assert [event["status"] for event in closed] == ["failed"]
