"""The real wandb in offline mode: what it stored is read back from its own file."""

import json
import os
import pty
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from flextrain.tracking import names
from flextrain.tracking.wandb import run_key

BLOCK_BYTES, HEADER = 32768, struct.Struct("<IHB")  # LevelDB's log format: checksum, length, type
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    data, position, partial = path.read_bytes(), 7, b""  # 7: the file's own header
    while position + HEADER.size <= len(data):
        left = BLOCK_BYTES - position % BLOCK_BYTES
        if left < HEADER.size:
            position += left
            continue
        _, length, kind = HEADER.unpack_from(data, position)
        position += HEADER.size
        partial = (b"" if kind in (FULL, FIRST) else partial) + data[position : position + length]
        position += length
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(partial)
            yield record


def history(path: Path) -> list[dict[str, float]]:
    rows = [record.history.item for record in records(path) if record.WhichOneof("record_type") == "history"]
    return [{"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in row} for row in rows]


ATTEMPT = """
import sys
from pathlib import Path
from flextrain.tracking import RunInfo, names
from flextrain.tracking.wandb import WandbTracker
folder, attempt, status, *steps = sys.argv[1:]
tracker = WandbTracker("offline", "flextrain", Path(folder))
tracker.start(RunInfo("exp", "2026/run:1", int(attempt), 0, 0, "life" + attempt, {"main": {"seed": 3}}))
for step in map(int, steps):
    tracker.log(step, {names.LOSS: step / 10})
tracker.event(names.CHECKPOINT, step=step)
tracker.close(status)
"""


def run_attempt(folder: Path, attempt: int, steps: Sequence[int], status: str) -> Path:
    """Run an attempt in a process of its own, as attempts do: in one process, wandb 0.31 may return from the finish
    of a second run of the same id before its file is written."""
    before = set(folder.glob("wandb/offline-run-*/run-*.wandb"))
    arguments = [str(folder), str(attempt), status, *map(str, steps)]
    subprocess.run([sys.executable, "-c", ATTEMPT, *arguments], check=True, timeout=120)
    (path,) = set(folder.glob("wandb/offline-run-*/run-*.wandb")) - before
    return path


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Attempt 0 does steps 1-40 and, as a trainer recovering in place would, 31-40 again; attempt 1 goes on from 21."""
    folder = tmp_path_factory.mktemp("wandb")
    steps = [*range(1, 41), *range(31, 41)]
    return [
        run_attempt(folder, 0, steps, names.Status.FAILED),
        run_attempt(folder, 1, range(21, 61), names.Status.FINISHED),
    ]


def test_every_step_is_kept_also_those_replayed(attempts: list[Path]) -> None:
    kept = [[(row[names.STEP], row[names.ATTEMPT], row[names.LOSS]) for row in history(path)] for path in attempts]
    assert kept[0] == [(step, 0, step / 10) for step in [*range(1, 41), *range(31, 41)]]
    assert kept[1] == [(step, 1, step / 10) for step in range(21, 61)]


def test_all_attempts_are_one_run_with_its_config(attempts: list[Path]) -> None:
    runs = [record.run for path in attempts for record in records(path) if record.WhichOneof("record_type") == "run"]
    assert {run.run_id for run in runs} == {"2026-run-1"}
    assert {run.project for run in runs} == {"flextrain"}
    assert any(item.key == "main" and json.loads(item.value_json) == {"seed": 3} for item in runs[0].config.update)


def test_curves_run_over_our_own_step(attempts: list[Path]) -> None:
    metrics = [r.metric for path in attempts for r in records(path) if r.WhichOneof("record_type") == "metric"]
    assert {(m.name or m.glob_name, m.step_metric) for m in metrics} == {(names.STEP, ""), ("*", names.STEP)}


def test_the_exit_code_tells_how_it_ended(attempts: list[Path]) -> None:
    codes = [r.exit.exit_code for path in attempts for r in records(path) if r.WhichOneof("record_type") == "exit"]
    assert codes == [1, 0]


def test_wandb_is_not_imported_before_a_run_starts() -> None:
    code = "import sys; from flextrain.tracking.wandb import WandbTracker; WandbTracker('online', 'p', '.'); "
    code += "sys.exit('wandb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_run_keys_hold_only_what_wandb_accepts() -> None:
    assert run_key("a/b\\c#d?e%f:g") == "a-b-c-d-e-f-g"
    assert len(run_key("x" * 100)) == 64


ONLINE = """
import sys
from pathlib import Path
from flextrain.tracking import CompositeTracker, RunInfo
from flextrain.tracking.wandb import WandbTracker
tracker = CompositeTracker([WandbTracker("online", "p", Path(sys.argv[1]))])
tracker.start(RunInfo("exp", "run", 0, 0, 0, "x"))
tracker.close("finished")
print("went on")
"""


def test_without_credentials_a_run_goes_on_and_asks_nobody_even_on_a_terminal(tmp_path: Path) -> None:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    environ |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "TERM": "xterm"}
    terminal, stdin = pty.openpty()
    try:
        command = [sys.executable, "-c", ONLINE, str(tmp_path)]
        done = subprocess.run(command, stdin=stdin, stderr=stdin, stdout=subprocess.PIPE, env=environ, timeout=120)
    finally:
        os.close(stdin)
        os.close(terminal)
    assert done.stdout == b"went on\n"
