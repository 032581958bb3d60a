"""SIGKILL at any step, then the same command again: the loss of every step is bitwise that of an undisturbed run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flextrain.cli.commands import audit
from flextrain.tracking import names, read_events

STEPS = 30
CONFIG = """
data: {sources: [corpus], tokenizer: "train:300", seq_length: 16, heldout_fraction: 0.2}
model: {d_model: 16, num_layers: 2, num_heads: 2, d_ff: 32}
training: {batch_size: 3, max_steps: 30, warmup_steps: 5}
checkpoint: {interval: 7}
tracking: {log_interval: 1}
"""


def launch(folder: Path, ranks: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "flextrain.cli.main", "train", "config.yaml", "--ranks", str(ranks)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def prepare(folder: Path) -> Path:
    (folder / "corpus").mkdir(parents=True)
    for i in range(20):
        words = " ".join(f"word{(i * 37 + j * j) % 101}" for j in range(200))
        (folder / "corpus" / f"{i}.txt").write_text(words)
    (folder / "config.yaml").write_text(CONFIG)
    return folder


def train_to_the_end(folder: Path, ranks: int) -> None:
    process = launch(folder, ranks)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output


def kill_at_step(folder: Path, ranks: int, step: int, victim: str) -> str:
    """Start, wait for the line of `step`, SIGKILL the agent or its last rank, and return all output."""
    process = launch(folder, ranks)
    assert process.stdout
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.strip().startswith(f"step {step}/") or line.strip().startswith(f"step  {step}/"):
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(process.pid if victim == "agent" else int(children[-1]), signal.SIGKILL)
            break
    rest, _ = process.communicate(timeout=60)
    output = "".join(lines) + rest
    assert process.returncode == (-signal.SIGKILL if victim == "agent" else 2), output
    assert "Traceback" not in rest.split("[FT-GNG")[-1]
    return output


def losses(folder: Path) -> dict[int, set[float]]:
    """Every loss that any attempt recorded, by step."""
    found: dict[int, set[float]] = {}
    for events in folder.glob("runs/default/*/events"):
        for event in read_events(events):
            if event["kind"] == "metrics" and event["rank"] == 0:
                found.setdefault(event["step"], set()).add(event["metrics"][names.LOSS])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_killed_run_goes_on_to_the_same_losses(ranks: int, tmp_path: Path) -> None:
    whole = prepare(tmp_path / "whole")
    train_to_the_end(whole, ranks)
    expected = losses(whole)
    assert sorted(expected) == list(range(1, STEPS + 1))
    broken = prepare(tmp_path / "broken")
    kill_at_step(broken, ranks, 3, "agent")  # before the first checkpoint
    kill_at_step(broken, ranks, 14, "rank")  # while one is being made
    kill_at_step(broken, ranks, 22, "agent")
    train_to_the_end(broken, ranks)
    assert losses(broken) == expected
    found = [found for _, found in audit(str(broken / "runs"))]  # killed before it has a checkpoint, a run begins anew
    assert [one.problems for one in found] == [()] * len(found)
    assert (found[-1].first, found[-1].last) == (1, STEPS)
    assert sum(one.lives for one in found) == 4
