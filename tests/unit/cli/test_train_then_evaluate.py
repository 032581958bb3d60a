"""The verbs one after another, at the smallest size, as processes of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flextrain.cli.main import main

SMALL = """\
data: {sources: [text], tokenizer: 'train:300', heldout_fraction: 0.4, seq_length: 16}
model: {d_model: 16, num_layers: 1, num_heads: 2, d_ff: 32}
training: {max_steps: 2, batch_size: 2, warmup_steps: 1}
evaluation: {prompts: [order], sample_tokens: 4}
"""


def flextrain(*argv: str) -> str:
    done = subprocess.run([sys.executable, "-m", "flextrain.cli.main", *argv], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.integration
def test_train_then_evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(SMALL)
    Path("text").mkdir()
    for number in range(12):
        Path(f"text/{number}.txt").write_text(f"Document {number} says that order {number * 7} is to be kept.\n" * 9)
    lines = dict(line.split(maxsplit=1) for line in flextrain("index", "small.yaml").splitlines())
    trained = flextrain("train", "small.yaml", "--ranks", "2").splitlines()[-4:]
    assert trained[0].split() == ["step", "2"]
    checkpoint = trained[2].split()[1]
    said = flextrain("evaluate", checkpoint, "small.yaml", "--index", lines["index"], "--json", "report.json")
    report = json.loads(Path("report.json").read_text())
    assert report["step"] == 2
    assert 0 < report["loss"] < report["uniform_loss"] * 1.1
    assert [sample["prompt"] for sample in report["samples"]] == ["order"]
    assert f"{report['loss']:.4f}" in said
    run = checkpoint.partition("/checkpoints/")[0]
    assert "each once" in flextrain("audit", run)
    events = Path(run, "events", next(path.name for path in Path(run, "events").glob("rank-00001.*")))
    events.unlink()
    lost = subprocess.run([sys.executable, "-m", "flextrain.cli.main", "audit", run], capture_output=True, text=True)
    assert lost.returncode == 2
    assert "samples are recorded, by ranks 0" in lost.stdout
    assert lost.stderr.startswith("[FT-GNG-030]")


def test_an_audit_of_nothing_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
