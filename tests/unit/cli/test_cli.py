"""The command as a whole: help, exit codes, and which function each verb calls with what."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flextrain.cli import commands
from flextrain.cli.main import main
from flextrain.config import Config
from flextrain.errors import CheckpointCorrupt
from flextrain.flowkit.refs import IndexRef

VERBS = ["train", "validate", "index", "evaluate"]


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom flextrain.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
        "sys.exit(', '.join({'pydantic', 'yaml', 'numpy', 'torch', 'metaflow', 'obstore'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, f"flextrain --help imports {done.stderr}"
    assert all(f"    {verb} " in done.stdout for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_each_verb_teaches_by_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    said = capsys.readouterr().out
    assert caught.value.code == 0
    assert f"examples:\n  flextrain {verb}" in said
    assert "--section.key=value" in said


def test_no_verb_shows_help_and_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().err


def test_validate_lists_what_differs_from_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    Path("c.yaml").write_text("training: {lr: 1e-4}\nmodel: {preset: gpt2-124m}\n")
    assert main(["validate", "c.yaml", "--data.seq_length=64"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("c.yaml is valid; 10 keys differ from the defaults:\n")
    assert "  training.learning_rate  0.0001  (default 0.003)\n" in out
    assert "  data.seq_length         64  (default 256)\n" in out
    assert err == ""


def test_validate_says_when_nothing_differs(capsys: pytest.CaptureFixture[str]) -> None:
    Path("c.yaml").write_text("training:\n  # lr: 1e-4\n")
    assert main(["validate", "c.yaml"]) == 0
    assert "every key is at its default" in capsys.readouterr().out


def test_interrupted_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "validate", interrupt)
    assert main(["validate", "c.yaml"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_verbs_error_is_shown_with_code_and_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def corrupt(*_: object) -> None:
        raise CheckpointCorrupt("step-00000003/x is gone", number=9, remedy="use an older one")

    monkeypatch.setattr(commands, "evaluate", corrupt)
    assert main(["evaluate", "step-00000003", "--index", "i"]) == 2
    assert capsys.readouterr().err == "[FT-CKP-009] step-00000003/x is gone\n  → use an older one\n"


def test_train_gets_configuration_and_ranks_and_says_where_the_result_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[Config, int | None]] = []

    def train(config: Config, ranks: int | None) -> dict[str, Any]:
        calls.append((config, ranks))
        return {"step": 7, "loss": 1.25, "checkpoint": {"url": "s3://b/step-00000007"}, "index": "s3://b/index"}

    monkeypatch.setattr(commands, "train", train)
    Path("c.yaml").write_text("training: {batch_size: 4}\n")
    assert main(["train", "--training.max_steps=7", "c.yaml", "--ranks", "3"]) == 0
    assert main(["train"]) == 0
    (given, ranks), default = calls
    assert (given.training.batch_size, given.training.max_steps, ranks) == (4, 7, 3)
    assert default == (Config(), None)
    out = capsys.readouterr().out
    assert "loss        1.2500 nats per token\ncheckpoint  s3://b/step-00000007\n" in out
    assert "flextrain evaluate s3://b/step-00000007 --index s3://b/index\n" in out


@dataclass
class Report:
    loss: float = 1.5

    def summary(self) -> str:
        return f"held-out loss {self.loss}"

    def to_dict(self) -> dict[str, float]:
        return {"loss": self.loss}


def test_evaluate_prints_the_report_and_writes_it_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(commands, "evaluate", lambda *given: calls.append(given) or Report())
    assert main(["evaluate", "s3://b/step-00000001", "--index", "idx", "--json", "out/eval.json"]) == 0
    assert calls == [(Config(), "s3://b/step-00000001", "idx")]
    assert capsys.readouterr().out == "held-out loss 1.5\n"
    assert json.loads(Path("out/eval.json").read_text()) == {"loss": 1.5}


def corpus(folder: Path) -> str:
    folder.mkdir()
    for number in range(12):
        (folder / f"{number}.txt").write_text(f"Document {number} says that order {number * 7} is to be kept.\n" * 9)
    return f"--data.sources=[{folder}]"


SMALL = ["--data.tokenizer=train:300", "--data.heldout_fraction=0.5"]


def test_index_is_built_where_asked_and_found_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["index", corpus(tmp_path / "text"), *SMALL, "-o", "idx"]
    assert main(argv) == 0
    first = capsys.readouterr().out
    written = (tmp_path / "idx" / "manifest.json").stat().st_mtime_ns
    assert main(argv) == 0
    assert capsys.readouterr().out == first
    assert (tmp_path / "idx" / "manifest.json").stat().st_mtime_ns == written
    assert f"index   {tmp_path / 'idx'}\ndigest  " in first


def test_index_goes_below_storage_or_output_dir_or_is_the_ready_one(tmp_path: Path) -> None:
    config = Config()
    config.data.sources, config.data.tokenizer, config.data.heldout_fraction = (
        [str(tmp_path / "text")],
        "train:300",
        0.5,
    )
    corpus(tmp_path / "text")
    config.main.output_dir = str(tmp_path / "out")
    here = commands.index(config, progress=False)
    assert here.uri.startswith(f"{tmp_path}/out/indexes/")
    config.checkpoint.storage = str(tmp_path / "store")
    there = commands.index(config, progress=False)
    assert there.uri.startswith(f"{tmp_path}/store/indexes/")
    assert there.digest == here.digest
    config.data.index = here.uri
    assert commands.index(config) == IndexRef(here.uri, here.digest)


def test_an_index_of_nothing_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text("")
    assert main(["index", "--data.sources=[empty.txt]", "-o", "idx"]) == 2
    assert capsys.readouterr().err.startswith("[FT-DAT-")
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]
