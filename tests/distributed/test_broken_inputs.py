"""Broken inputs through the real commands: exit code 2, the place and the remedy, no traceback, nothing half-written.

The configurations among the broken inputs are in tests/unit/config and tests/unit/cli; these are files, indexes and
checkpoints.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flextrain.cli.main import main

CONFIG = """
data: {sources: [corpus], tokenizer: "train:300", seq_length: 16, heldout_fraction: 0.2}
model: {d_model: 16, num_layers: 1, num_heads: 2, d_ff: 32}
training: {batch_size: 2, max_steps: 2, warmup_steps: 1}
evaluation: {max_tokens: 64, sample_tokens: 0}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a tiny model was trained."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "corpus").mkdir()
    for i in range(12):
        (folder / "corpus" / f"{i}.txt").write_text(" ".join(f"word{(i * 37 + j * j) % 101}" for j in range(120)))
    (folder / "config.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "flextrain.cli.main", "train", "config.yaml"]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180)
    assert ran.returncode == 0, ran.stderr
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it to break, as the current folder."""
    subprocess.run(["cp", "-r", f"{trained}/.", str(tmp_path)], check=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def index_of(folder: Path) -> Path:
    return next(folder.glob("runs/indexes/*"))


def checkpoint_of(folder: Path) -> Path:
    return next(folder.glob("runs/default/*/checkpoints/step-00000002"))


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def edit_manifest(path: Path, key: str, value: object) -> None:
    body = json.loads(path.read_text())
    body[key] = value
    path.write_text(json.dumps(body))


def evaluation(folder: Path) -> list[str]:
    return ["evaluate", str(checkpoint_of(folder)), "config.yaml", "--index", str(index_of(folder))]


def another_index(folder: Path) -> list[str]:
    """Evaluate with an index made by a larger tokenizer than the model knows."""
    assert main(["index", "config.yaml", "--data.tokenizer=train:400", "-o", "other"]) == 0
    return ["evaluate", str(checkpoint_of(folder)), "config.yaml", "--index", "other"]


TRAIN = ["train", "config.yaml"]
Break = Callable[[Path], list[str] | None]
# name -> (what is broken, returning the command where it is not TRAIN; what the message must say)
CASES: dict[str, tuple[Break, list[str]]] = {
    "a token flipped in a shard": (
        lambda f: flip(index_of(f) / "train-00000.bin"),
        ["FT-DAT-017", "train-00000.bin", "build it again"],
    ),
    "a shard cut short": (
        lambda f: (index_of(f) / "train-00000.bin").write_bytes(b"xx") and None,
        ["FT-DAT-016", "train-00000.bin has 2 bytes"],
    ),
    "a shard gone": (
        lambda f: (index_of(f) / "heldout-00000.bin").unlink(),
        ["FT-DAT-016", "heldout-00000.bin is missing"],
    ),
    "an index manifest that is no JSON": (
        lambda f: (index_of(f) / "manifest.json").write_text("{") and None,
        ["FT-DAT-014", "manifest.json"],
    ),
    "a checkpoint of another model": (
        lambda f: [*TRAIN, "--model.d_model=32"],
        ["FT-CKP-005", "step-00000002", "main.experiment_name"],
    ),
    "another seed than the run's": (
        lambda f: [*TRAIN, "--main.seed=1"],
        ["FT-CKP-008", "main.seed is 1", "main.experiment_name"],
    ),
    "another global batch than the run's": (
        lambda f: [*TRAIN, "--training.global_batch_size=64"],
        ["FT-CKP-008", "training.global_batch_size is 64"],
    ),
    "other text than the run's": (
        lambda f: (f / "corpus" / "more.txt").write_text("one more document " * 50) and None,
        ["FT-CKP-008", "training data"],
    ),
    "no such checkpoint": (
        lambda f: ["evaluate", "runs/default/step-00000009", "--index", str(index_of(f))],
        ["FT-CKP-004", "step-00000009"],
    ),
    "a weight flipped in a checkpoint": (
        lambda f: flip(next(checkpoint_of(f).glob("*/rank-00000.bin"))) or evaluation(f),
        ["FT-CKP-006", "rank-00000.bin differs from its hash"],
    ),
    "a hostile manifest": (
        lambda f: edit_manifest(checkpoint_of(f) / "manifest.json", "objects", {"../../x": {}}) or evaluation(f),
        ["FT-CKP-001", "manifest.json"],
    ),
    "an index of another tokenizer": (another_index, ["FT-CKP-031", "tokenizer"]),
    "output_dir is a file": (
        lambda f: (f / "file").write_text("") or [*TRAIN, "--main.output_dir=file"],
        ["FT-STO-", "file"],
    ),
    "no ranks": (lambda f: [*TRAIN, "--ranks", "0"], ["--ranks", ">= 1"]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_broken_input_is_named_with_its_remedy(name: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    damage, expected = CASES[name]
    command = damage(folder) or TRAIN
    manifests = {path: path.read_bytes() for path in folder.rglob("manifest.json")}
    capfd.readouterr()
    try:
        code = main(command)
    except SystemExit as exit_:  # argparse's own way out
        code = int(exit_.code or 0)
    error = capfd.readouterr().err
    assert code == 2, error
    assert "Traceback" not in error
    for text in expected:
        assert text in error
    assert "→" in error or "expected" in error or ">= 1" in error, "says what to do"
    assert {path: path.read_bytes() for path in manifests} == manifests
    assert not [path for path in folder.rglob("*") if path.suffix == ".part" or ".unchecked" in path.name]
