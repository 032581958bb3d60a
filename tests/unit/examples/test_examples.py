"""Every example runs, at a size that takes seconds, and does what its README says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flextrain.config import load_config
from flextrain.model import build_model
from flextrain.model.stats import count_parameters

EXAMPLES = Path(__file__).parents[3] / "examples"
TINY = [
    "--data.sources=[corpus]",
    "--data.tokenizer=train:280",
    "--data.seq_length=32",
    "--data.heldout_fraction=0.2",
    "--model.d_model=16",
    "--model.num_layers=1",
    "--model.num_heads=2",
    "--model.d_ff=32",
    "--training.batch_size=2",
    "--training.global_batch_size=4",
    "--training.max_steps=3",
    "--training.compile=false",
]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a few texts to train on."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(12):
        (corpus / f"{i}.txt").write_text(f"Node {i} left the gang and came back to the same sample. " * 20)
    return tmp_path


def start(home: Path, *words: str) -> str:
    """What a command prints; it must succeed."""
    environ = {**os.environ, "PATH": f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(words, cwd=home, env=environ, text=True, capture_output=True, timeout=180)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_every_example_has_a_readme_and_a_start() -> None:
    for folder in EXAMPLES.iterdir():
        assert (folder / "README.md").is_file(), f"{folder} has no README.md"
        assert os.access(folder / "run.sh", os.X_OK), f"{folder}/run.sh cannot be started"


def test_the_quickstart_trains_and_its_checkpoint_can_be_scored(home: Path) -> None:
    printed = start(home, str(EXAMPLES / "quickstart_python" / "run.sh"), *TINY)
    assert "step 3/3" in printed
    (line,) = [line for line in printed.splitlines() if line.startswith("next:")]
    scored = start(home, *line.removeprefix("next:").split(), "--evaluation.sample_tokens=4")
    assert "bits per byte" in scored


def test_the_quickstart_names_a_mistake_and_shows_no_traceback(home: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "quickstart_python" / "quickstart.py"), "--data.sources=[nowhere]"]
    result = subprocess.run(command, cwd=home, text=True, capture_output=True)
    assert result.returncode == 2
    assert "nowhere" in result.stderr
    assert "Traceback" not in result.stderr


def test_gpt2_124m_runs_small(home: Path) -> None:
    printed = start(home, str(EXAMPLES / "gpt2_124m" / "run.sh"), *TINY, "--model.vocab_size=null")
    assert "step 3/3" in printed
    assert list((home / "runs" / "gpt2-124m").glob("*/checkpoints/step-00000003/manifest.json"))


def test_gpt2_124m_is_what_it_says() -> None:
    config = load_config(EXAMPLES / "gpt2_124m" / "config.yaml")
    with torch.device("meta"):
        model = build_model(config.model, vocab_size=32768, seq_length=config.data.seq_length, seed=0)
    assert round(count_parameters(model) / 1e6) == 124
    assert config.training.global_batch_size is not None
    tokens_per_step = config.training.global_batch_size * config.data.seq_length
    assert tokens_per_step * (config.training.max_steps or 0) == pytest.approx(10e9, rel=1e-3)
