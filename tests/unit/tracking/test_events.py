"""Lines survive kills, tears and strange values; stores get what folders have."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flextrain.storage.store import Store, open_store
from flextrain.tracking import AGENT_RANK, EventLog, RunInfo, event_path, names, read_events, upload_events
from flextrain.tracking.events import parse

RUN = RunInfo("exp", "run-1", attempt=2, rank=0, node=1, incarnation="abc", config={"main": {"seed": 3}})


def write_three_steps(folder: Path, run: RunInfo = RUN) -> Path:
    log = EventLog(event_path(folder, run))
    log.start(run)
    for step in (1, 2, 3):
        log.log(step, {names.LOSS: 4.0 / step})
    log.event(names.STATE, state=names.State.IDLE)
    log.close(names.Status.FINISHED)
    return log.path


def test_every_line_says_who_when_and_what(tmp_path: Path) -> None:
    write_three_steps(tmp_path)
    start, *steps, state, close = read_events(tmp_path)
    identity = {"run": "run-1", "attempt": 2, "rank": 0, "node": 1, "incarnation": "abc"}
    for event in (start, *steps, state, close):
        assert identity.items() <= event.items()
    assert (start["kind"], start["experiment"], start["config"]) == ("start", "exp", {"main": {"seed": 3}})
    assert [(s["step"], s["metrics"]) for s in steps] == [(n, {names.LOSS: 4.0 / n}) for n in (1, 2, 3)]
    assert (state["kind"], state["name"], state["fields"]) == ("event", "state", {"state": "idle"})
    assert (close["kind"], close["status"]) == ("close", "finished")
    assert start["t"] <= steps[0]["t"] <= close["t"]


def test_files_are_named_after_rank_or_agent_and_incarnation(tmp_path: Path) -> None:
    agent = RunInfo("exp", "run-1", attempt=0, rank=AGENT_RANK, node=3, incarnation="i7")
    assert event_path(tmp_path, RUN).name == "rank-00000.abc.jsonl"
    assert event_path(tmp_path, agent).name == "node-0003.i7.jsonl"


def test_event_fields_may_be_called_like_the_identity(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "a.jsonl")
    log.start(RUN)
    log.event(names.FAILURE, node=7, name="x", t="late")
    *_, event = read_events(tmp_path)
    assert event["node"] == 1
    assert event["fields"] == {"node": 7, "name": "x", "t": "late"}


def test_values_json_lacks_come_back_as_numbers_and_the_file_is_strict_json(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "a.jsonl")
    log.start(RUN)
    values: dict[str, Any] = {"nan": math.nan, "inf": -math.inf, "half": np.float32(0.5), "huge": np.float32("inf")}
    log.log(1, values | {"whole": np.int64(3)})
    log.event(names.FAILURE, path=tmp_path, nested=[{"x": math.inf}])
    _, metrics, event = read_events(tmp_path)
    assert math.isnan(metrics["metrics"].pop("nan"))
    assert metrics["metrics"] == {"inf": -math.inf, "half": 0.5, "huge": math.inf, "whole": 3.0}
    assert event["fields"] == {"path": str(tmp_path), "nested": [{"x": "inf"}]}
    for line in log.path.read_bytes().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_nothing_is_written_after_close_and_closing_twice_is_no_error(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "a.jsonl")
    log.start(RUN)
    log.close(names.Status.FAILED)
    log.event(names.BEAT)
    log.close(names.Status.FINISHED)
    assert [event["kind"] for event in read_events(tmp_path)] == ["start", "close"]


@given(cut=st.integers(min_value=0, max_value=10_000))
def test_a_torn_file_loses_only_the_line_it_is_torn_in(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("torn")
    path = write_three_steps(folder)
    whole = path.read_bytes()
    cut %= len(whole) + 1
    path.write_bytes(whole[:cut])
    complete = [json.loads(line) for line in (whole[:cut] + b"|").splitlines()[:-1]]
    events = list(read_events(folder))
    assert events[: len(complete)] == complete
    assert len(events) - len(complete) in (0, 1)  # 1 where only the line feed is missing


def test_a_process_that_continues_a_torn_file_starts_a_fresh_line(tmp_path: Path) -> None:
    path = write_three_steps(tmp_path)
    path.write_bytes(path.read_bytes()[:-10])
    write_three_steps(tmp_path)
    assert [event["kind"] for event in read_events(tmp_path)] == [
        *("start", "metrics", "metrics", "metrics", "event"),
        *("start", "metrics", "metrics", "metrics", "event", "close"),
    ]


GOOD = {"run": "r", "attempt": 0, "rank": 0, "node": 0, "incarnation": "i", "t": 1.0, "kind": "close", "status": "x"}


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\x00\xff\xfe",
        b"[1, 2]",
        b"3",
        b"[" * 100_000,
        json.dumps(GOOD).encode()[:-1],
        *(json.dumps({k: v for k, v in GOOD.items() if k != gone}).encode() for gone in GOOD),
        *(json.dumps(GOOD | {k: [v]}).encode() for k, v in GOOD.items()),
        json.dumps(GOOD | {"t": math.nan}).encode(),
        json.dumps(GOOD | {"kind": "metrics", "step": 1, "metrics": {"a": "b"}}).encode(),
        json.dumps(GOOD | {"kind": "metrics", "step": 1, "metrics": [1]}).encode(),
        json.dumps(GOOD | {"kind": "event", "name": "state"}).encode(),
    ],
)
def test_a_line_that_is_no_event_is_skipped(line: bytes) -> None:
    assert parse(json.dumps(GOOD).encode()) == GOOD
    assert parse(line) is None


WRITER = """
import sys
from pathlib import Path
from flextrain.tracking import EventLog, RunInfo
log = EventLog(Path(sys.argv[1]) / "rank-00000.x.jsonl")
log.start(RunInfo("exp", "run", 0, 0, 0, "x"))
step = 0
while True:
    step += 1
    log.log(step, {"train/loss": 1.0 / step, "train/tokens": 8192.0})
    if step == 2000:
        print("written", flush=True)
"""


def test_a_killed_process_loses_nothing_it_had_logged(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "written\n"
        process.kill()
        assert process.wait() == -9
    steps = [event["step"] for event in read_events(tmp_path) if event["kind"] == "metrics"]
    assert len(steps) >= 2000
    assert steps == list(range(1, len(steps) + 1))


def test_a_folder_that_does_not_exist_has_no_events(tmp_path: Path) -> None:
    assert list(read_events(tmp_path / "none")) == []
    assert list(read_events(open_store(tmp_path / "none"))) == []


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store("memory://bucket" if request.param == "memory" else tmp_path / "store").child("events")


def test_a_store_gives_the_events_that_were_uploaded_to_it(tmp_path: Path, store: Store) -> None:
    write_three_steps(tmp_path / "events")
    assert upload_events(tmp_path / "events", store) == 1
    assert list(read_events(store)) == list(read_events(tmp_path / "events"))


def test_only_files_that_grew_are_uploaded_again_and_never_half_a_line(tmp_path: Path, store: Store) -> None:
    folder = tmp_path / "events"
    path = write_three_steps(folder)
    write_three_steps(folder, RunInfo("exp", "run-1", 2, 1, 1, "abc"))
    assert upload_events(folder, store) == 2
    assert upload_events(folder, store) == 0
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"half": ')
    assert upload_events(folder, store) == 0
    path.write_bytes(whole + b'{"half": 0.5}\n')
    assert upload_events(folder, store) == 1
    assert store.get(path.name) == path.read_bytes()


def test_an_upload_never_shrinks_what_the_store_has(tmp_path: Path, store: Store) -> None:
    folder = tmp_path / "events"
    path = write_three_steps(folder)
    upload_events(folder, store)
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    assert upload_events(folder, store) == 0
    assert store.get(path.name) == whole


def test_a_folder_is_not_uploaded_onto_itself(tmp_path: Path) -> None:
    """Replacing the file would leave its writer appending to one that nobody can see any more."""
    log = EventLog(tmp_path / "a.jsonl")
    log.start(RUN)
    assert upload_events(tmp_path, open_store(tmp_path)) == 0
    log.event(names.BEAT)
    assert [event["kind"] for event in read_events(tmp_path)] == ["start", "event"]
