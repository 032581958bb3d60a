"""A workshop for flow tests: an empty home, a tiny corpus, and the flows run as a user would."""

import os
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from tests.support.s3 import bucket, s3_endpoint

__all__ = ["bucket", "s3_endpoint"]
FLOWS = Path(__file__).parents[2] / "flows"
WORDS = ["the", "gang", "trains", "on", "nodes", "that", "may", "vanish", "and", "comes", "back", "with", "weights"]


@dataclass
class Workshop:
    """Where a test's flows run: `home` holds Metaflow's data, the corpus and the runs."""

    home: Path
    environ: dict[str, str] = field(default_factory=dict)

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

    def flow(self, name: str, *words: str, timeout_s: float = 180, **environ: str) -> subprocess.CompletedProcess[str]:
        """`python flows/NAME WORDS…`, as a user would start it."""
        command = [sys.executable, str(FLOWS / name), *words]
        return subprocess.run(
            command, cwd=self.home, env={**self.environ, **environ}, text=True, capture_output=True, timeout=timeout_s
        )


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    rng = random.Random(7)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(12):
        (corpus / f"{i}.txt").write_text(" ".join(rng.choice(WORDS) for _ in range(400)))
    ours = {
        "METAFLOW_HOME": str(tmp_path / "metaflow-home"),
        "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(tmp_path / "datastore"),
        "METAFLOW_CLIENT_CACHE_PATH": str(tmp_path / "client-cache"),
        "OMP_NUM_THREADS": "1",
        "USERNAME": "tester",
        "HF_HUB_OFFLINE": "1",
    }
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    for name in [name for name in os.environ if name.startswith("METAFLOW_") and name not in ours]:
        monkeypatch.delenv(name)
    return Workshop(tmp_path, dict(os.environ))


def must(result: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """The result, once it is sure that it succeeded."""
    assert result.returncode == 0, result.stdout + result.stderr
    return result
