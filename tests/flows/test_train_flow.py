"""The whole chain as a user runs it: on this machine, from Python, and after a kill."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.flows.conftest import FLOWS, Workshop, must, open_workshop

pytestmark = [pytest.mark.integration, pytest.mark.slow]

LOOK_INSIDE = """
import json, pickle, sys
from metaflow import Run, namespace
namespace(None)
run = Run(f"TrainFlow/{sys.argv[1]}")
data = run["end"].task.data
refs = {name: getattr(data, name) for name in ("launch", "index_ref", "train_ref", "report", "cost")}
print(json.dumps({
    "sizes": {name: len(pickle.dumps(ref)) for name, ref in refs.items()},
    "checkpoint": data.train_ref.checkpoint.uri, "step": data.train_ref.checkpoint.step,
    "index": data.index_ref.uri, "events": data.train_ref.events_uri, "task": data.train_ref.task,
    "report": data.report.to_dict(), "cost": data.cost.to_dict(),
    "attempts": sorted(task.current_attempt for task in run["train"]),
}))
"""


def look_inside(workshop: Workshop, run_id: str) -> dict[str, Any]:
    """What a finished run's artifacts say, read by Metaflow's client in a process of its own."""
    result = must(workshop.python(LOOK_INSIDE, run_id))
    return dict(json.loads(result.stdout))


def run_id_of(text: str) -> str:
    match = re.search(r"run-id (\d+)", text)
    assert match, text
    return match[1]


def events_of(folder: str) -> list[dict[str, Any]]:
    files = sorted(Path(folder).glob("*.jsonl"))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """One for all tests of this file, so that they can look at one run."""
    return open_workshop(tmp_path_factory.mktemp("local"), {"PATH": "/usr/bin:/bin"})


@pytest.fixture(scope="module")
def first(workshop: Workshop) -> dict[str, Any]:
    """A run of two nodes at the spot price."""
    path = workshop.write_config(main={"experiment_name": "first"})
    result = must(workshop.flow("train_flow.py", "--config", "config", str(path), "run", "--use-spot-instances"))
    run_id = run_id_of(result.stdout)
    return {"run_id": run_id, "stdout": result.stdout, "stderr": result.stderr, **look_inside(workshop, run_id)}


def test_the_end_prints_one_table_and_where_to_look_next(first: dict[str, Any]) -> None:
    text = re.sub(r"^\S+ \S+ \[\S+ \(pid \d+\)\] ?", "", first["stdout"], flags=re.MULTILINE)
    summary = text[text.index(f"Run {first['run_id']}") :]
    for name in ("held-out loss", "bits per byte", "accuracy", "paid", "on-demand", "checkpoint"):
        assert re.search(rf"^ *{name}  +\S", summary, re.MULTILINE), f"{name} is not in\n{summary}"
    assert f"card view {first['run_id']}/train/3" in summary
    assert first["checkpoint"] in summary


def test_artifacts_are_small_references(first: dict[str, Any]) -> None:
    assert max(first["sizes"].values()) < 10_000, first["sizes"]
    assert first["step"] == 6


def test_spot_is_priced_as_spot(first: dict[str, Any]) -> None:
    assert first["cost"]["quote"]["capacity"] == "spot"
    assert first["cost"]["paid_usd"] > 0


def test_every_step_that_works_is_paid_for(first: dict[str, Any]) -> None:
    seconds = first["cost"]["seconds_by_state"]
    assert {state for state, value in seconds.items() if value > 0} >= {
        "useful",
        "restart",
        "checkpoint",
        "index",
        "eval",
    }
    assert first["cost"]["progress"]["steps"] == 6


def test_the_training_card_shows_the_whole_run_offline(workshop: Workshop, first: dict[str, Any]) -> None:
    page = workshop.home / "card.html"
    must(workshop.flow("train_flow.py", "card", "get", first["task"], str(page)))
    assert "fonts.googleapis.com" not in page.read_text()
    for step in ("evaluate", "cost_report"):
        must(workshop.flow("train_flow.py", "card", "get", f"{first['run_id']}/{step}", str(page)))


def test_the_evaluation_can_be_run_alone(workshop: Workshop, first: dict[str, Any]) -> None:
    config = ["--config", "config", str(workshop.home / "config.yaml")]
    where = ["--checkpoint", first["checkpoint"], "--index", first["index"]]
    result = must(workshop.flow("evaluate_flow.py", *config, "run", *where))
    assert f"{first['report']['loss']:.4f}" in result.stdout


def test_the_index_is_found_again_by_a_flow_of_its_own(workshop: Workshop, first: dict[str, Any]) -> None:
    config = ["--config", "config", str(workshop.home / "config.yaml")]
    result = must(workshop.flow("index_flow.py", *config, "run"))
    assert first["index"] in result.stdout
    assert "is ready" in result.stdout


RUNNER = f"""
import sys, yaml
from metaflow import Runner
values = [("config", yaml.safe_load(sys.argv[1]))]
with Runner({str(FLOWS / "train_flow.py")!r}, show_output=False, config_value=values) as runner:
    running = runner.run(num_nodes=1, checkpoint_resume=True, use_spot_instances=False)
    print(running.stdout, running.stderr)
"""


def test_a_run_from_python_goes_on_from_the_newest_checkpoint_and_says_which(
    workshop: Workshop, first: dict[str, Any]
) -> None:
    config = workshop.config(main={"experiment_name": "first"}, training={"max_steps": 8})
    result = must(workshop.python(RUNNER, config))
    assert f"going on from {first['checkpoint']}" in result.stdout
    again = look_inside(workshop, run_id_of(result.stdout))
    steps = [event["step"] for event in events_of(again["events"]) if event["kind"] == "metrics" and event["rank"] == 0]
    assert steps == [7, 8]
    assert again["cost"]["quote"]["capacity"] == "on_demand"


def test_a_mistake_that_only_training_sees_is_shown_once_and_not_retried(
    workshop: Workshop, first: dict[str, Any]
) -> None:
    config = workshop.config(main={"experiment_name": "first", "seed": 9}, training={"max_steps": 8})
    words = ["--config-value", "config", config, "run", "--checkpoint-resume", "--num-nodes", "1"]
    result = workshop.flow("train_flow.py", *words)
    text = result.stdout + result.stderr
    assert result.returncode == 1
    assert text.count("[FT-CKP-008] main.seed is 9") == 1
    assert "will not be retried" in text
    assert "Traceback" not in text


def test_a_killed_attempt_is_healed_by_the_retry(workshop: Workshop) -> None:
    config = workshop.config(
        main={"experiment_name": "killed"}, training={"max_steps": 400}, checkpoint={"interval": 20}
    )
    words = ["--config-value", "config", config, "run", "--num-nodes", "2"]
    text = workshop.kill_training("train_flow.py", *words, at_step=40)
    again = look_inside(workshop, run_id_of(text))
    assert again["step"] == 400
    assert set(again["attempts"]) == {1}
    losses: dict[int, set[float]] = {}
    for event in events_of(again["events"]):
        if event["kind"] == "metrics" and event["rank"] == 0 and "train/loss" in event["metrics"]:
            losses.setdefault(event["step"], set()).add(event["metrics"]["train/loss"])
    assert sorted(losses) == list(range(1, 401))
    assert all(len(values) == 1 for values in losses.values()), "a replayed step gave another loss"
    resumed = [event["fields"]["step"] for event in events_of(again["events"]) if event.get("name") == "resume"]
    assert resumed
    assert min(resumed) >= 20
    assert again["cost"]["attempts"] == 2
    assert again["cost"]["interruptions"] == 1
