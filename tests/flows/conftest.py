"""A workshop for flow tests: an empty home, a tiny corpus, and the flows run as a user would."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from tests.support.s3 import bucket, s3_endpoint

__all__ = ["bucket", "s3_endpoint"]
TIMEOUT_S = 300
FLOWS = Path(__file__).parents[2] / "flows"
WORDS = ["the", "gang", "trains", "on", "nodes", "that", "may", "vanish", "and", "comes", "back", "with", "weights"]


@dataclass
class Workshop:
    """Where a test's flows run: `home` holds Metaflow's data, the corpus and the runs."""

    home: Path
    environ: dict[str, str]

    def config(self, **sections: dict[str, object]) -> str:
        """YAML of the smallest configuration that trains, with `sections` merged in."""
        tiny: dict[str, dict[str, object]] = {
            "main": {"output_dir": str(self.home / "runs")},
            "data": {
                "sources": [str(self.home / "corpus")],
                "tokenizer": "train:280",
                "seq_length": 32,
                "heldout_fraction": 0.2,
            },
            "model": {"d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 32},
            "training": {"batch_size": 2, "max_steps": 6, "warmup_steps": 2},
            "checkpoint": {"interval": 2},
            "evaluation": {"max_tokens": 512, "sample_tokens": 4, "prompts": ["the "]},
            "tracking": {"log_interval": 2},
        }
        for name, keys in sections.items():
            tiny.setdefault(name, {}).update(keys)
        return yaml.safe_dump(tiny)

    def write_config(self, **sections: dict[str, object]) -> Path:
        path = self.home / "config.yaml"
        path.write_text(self.config(**sections))
        return path

    def flow(self, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        """`python flows/NAME WORDS…`, as a user would start it."""
        return self._run([sys.executable, str(FLOWS / name), *words])

    def python(self, code: str, *words: str) -> subprocess.CompletedProcess[str]:
        return self._run([sys.executable, "-c", code, *words])

    def kill_training(self, name: str, *words: str, at_step: int, succeeds: bool = True) -> str:
        """Run a flow and SIGKILL the task of node 0 once it prints `at_step`; returns what the flow printed."""
        command = [sys.executable, str(FLOWS / name), *words]
        seen: list[str] = []
        victim = 0
        with subprocess.Popen(
            command, cwd=self.home, env=self.environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            assert process.stdout
            for line in process.stdout:
                seen.append(line)
                task = re.search(r"/train/\d+ \(pid (\d+)\)\] (?:step (\d+)/)?", line)
                if not victim and task and task[2] and int(task[2]) >= at_step:
                    victim = int(task[1])
                    os.kill(victim, signal.SIGKILL)
        text = "".join(seen)
        assert victim, text
        assert (process.returncode == 0) is succeeds, text
        return text

    def forget_local_files(self) -> None:
        """Remove what runs left on this machine, as if the next command ran on another."""
        shutil.rmtree(self.home / "runs")

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=self.home, env=self.environ, text=True, capture_output=True, timeout=TIMEOUT_S
        )


def open_workshop(home: Path, environ: dict[str, str] | None = None) -> Workshop:
    """A workshop in the empty folder `home`; nothing of the user's Metaflow reaches it."""
    rng = random.Random(7)
    (home / "corpus").mkdir()
    for i in range(12):
        (home / "corpus" / f"{i}.txt").write_text(" ".join(rng.choice(WORDS) for _ in range(400)))
    ours = {
        "METAFLOW_HOME": str(home / "metaflow-home"),
        "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(home / "datastore"),
        "METAFLOW_CLIENT_CACHE_PATH": str(home / "client-cache"),
        "OMP_NUM_THREADS": "1",
        "USERNAME": "tester",
        "HF_HUB_OFFLINE": "1",
    }
    others = {name: value for name, value in os.environ.items() if not name.startswith("METAFLOW_")}
    return Workshop(home, {**others, **ours, **(environ or {})})


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return open_workshop(tmp_path)


def must(result: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """The result, once it is sure that it succeeded."""
    assert result.returncode == 0, result.stdout + result.stderr
    return result
