"""Broken configurations, as a user meets them: exit code 2, place and remedy, no traceback, nothing left behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flextrain.cli.main import main

# name -> (the file's bytes, place, what must be said)
FILES: dict[str, tuple[bytes, str, list[str]]] = {
    "misspelt key": (b"training:\n  learning_rte: 1e-4\n", "c.yaml:2:3", ["Did you mean `training.learning_rate`?"]),
    "misspelt section": (b"trainin:\n  lr: 1\n", "c.yaml:1:1", ["Did you mean `training`?"]),
    "key without its section": (b"\nlr: 1e-4\n", "c.yaml:2:1", ["Did you mean `training.learning_rate`?"]),
    "key in the wrong section": (b"model:\n  seq_length: 9\n", "c.yaml:2:3", ["Did you mean `data.seq_length`?"]),
    "key nobody knows": (b"flow:\n  zzz: 1\n", "c.yaml:2:3", ["Known keys here: num_nodes, retries"]),
    "text for a number": (b"training:\n  max_steps: many\n", "c.yaml:2:14", ['is "many"; expected a whole']),
    "fraction for a whole number": (b"training: {batch_size: 1.5}", "c.yaml:1:24", ["expected a whole number >= 1"]),
    "true for a number": (b"training:\n  batch_size: yes\n", "c.yaml:2:15", ["is true", "a whole number >= 1"]),
    "number for text": (b"tracking:\n  wandb_project: 7\n", "c.yaml:2:18", ["Put it in quotes"]),
    "too small": (b"training:\n  batch_size: 0\n", "c.yaml:2:15", ["sequences per rank in one forward pass"]),
    "too large": (b"data: {heldout_fraction: 1.5}", "c.yaml:1:26", ["a number > 0 and < 1", "share of documents"]),
    "not finite": (b"training: {grad_clip: .inf}", "c.yaml:1:23", ["expected a number > 0 or null"]),
    "no such choice": (b"distributed:\n  strategy: fdsp\n", "c.yaml:2:13", ["one of `auto`,", "Did you mean `fsdp`?"]),
    "bad characters in a name": (b"main:\n  experiment_name: a b\n", "c.yaml:2:20", ["letters, digits, `.`"]),
    "empty text": (b"main:\n  output_dir: ''\n", "c.yaml:2:15", ["expected text that is not empty"]),
    "one value for a list": (b"data:\n  sources: a.txt\n", "c.yaml:2:12", ['Write it as a list: ["a.txt"]']),
    "wrong item of a list": (b"data:\n  sources:\n  - a\n  - 5\n", "c.yaml:4:5", ["`data.sources[1]` is 5"]),
    "value for a section": (b"training: 5\n", "c.yaml:1:11", ["expected a section with the keys batch_size"]),
    "list at the top": (b"- training\n- model\n", "c.yaml:1:1", ["expected sections such as `training:`"]),
    "text at the top": (b"hello\n", "c.yaml:1:1", ["expected sections such as `training:`"]),
    "row of prices without a date": (
        b"cost:\n  prices:\n  - {instance_type: m5.large, on_demand_usd_per_h: 1, spot_usd_per_h: 1, source: me}\n",
        "c.yaml:3:5",
        ["`cost.prices[0].as_of` is missing", "YYYY-MM-DD"],
    ),
    "impossible date": (b"cost: {prices: [{as_of: 2026-02-30}]}", "c.yaml:1:25", ["expected a date such as"]),
    "node type without a price": (b"cost:\n  instance_type: p5\n", "c.yaml:2:18", ["rows are m5.large"]),
    "heads that do not divide": (b"model:\n  d_model: 100\n  num_heads: 3\n", "c.yaml:3:14", ["does not divide"]),
    "no end": (b"training:\n  max_steps: null\n", "c.yaml:2:14", ["one of max_steps and epochs must be given"]),
    "alias beside its name": (b"training:\n  learning_rate: 1\n  lr: 2\n", "c.yaml:3:3", ["keep one of them"]),
    "duplicate key": (b"data:\n  index: a\n  index: b\n", "c.yaml:3:3", ["given twice, first on line 2"]),
    "duplicate section": (b"data: {}\nmodel: {}\ndata: {}\n", "c.yaml:3:1", ["given twice, first on line 1"]),
    "open bracket": (b"data:\n  sources: [a\nmodel:\n", "c.yaml:3:6", ["close the bracket"]),
    "open quote": (b"data:\n  text_key: 'a\n", "c.yaml:3:1", ["close the quote"]),
    "tab": (b"data:\n\ttext_key: a\n", "c.yaml:2:1", ["use spaces, not tabs"]),
    "bad indentation": (b"data:\n  text_key: a\n index: b\n", "c.yaml:3:2", ["check the indentation"]),
    "unquoted colon": (b"data:\n  text_key: a: b\n", "c.yaml:2:14", ["in quotes"]),
    "tag": (b"data: !!python/object:os.system {}\n", "c.yaml:1:7", ["remove the tag"]),
    "two documents": (b"data: {}\n---\nmodel: {}\n", "c.yaml:2:1", ["remove the `---` line"]),
    "endless nesting": (b"data: &a [*a]\n", "c.yaml", ["nested too deeply"]),
    "control character": (b"data:\n  text_key: a\x07\n", "c.yaml:2:14", ["U+0007", "plain UTF-8 text"]),
    "empty file": (b" \n", "c.yaml", ["the file is empty", "name no file"]),
    "binary": (b"\x7fELF\x02\0\0\0", "c.yaml", ["binary file", "name a YAML file"]),
    "not UTF-8": ("main: {experiment_name: é}".encode("latin-1"), "c.yaml", ["byte 24 is 0xe9", "UTF-8"]),
    "data instead of a configuration": (b"text " * 300_000, "c.yaml", ["larger than 1,000,000 bytes"]),
}  # fmt: skip

FLAGS: dict[str, tuple[str, list[str]]] = {
    "unknown key": ("--training.learning_rte=1", ["Did you mean `training.learning_rate`?"]),
    "unknown section": ("--nothing.x=1", ["Known keys here: main, data"]),
    "no section": ("--lr=1e-4", ["are --section.key=value", "Did you mean `--training.learning_rate=1e-4`?"]),
    "too deep": ("--flow.spot_node_selector.a=b", ["expected --section.key=value"]),
    "bad value": ("--training.max_steps=0", ["expected a whole number >= 1"]),
    "bad YAML": ("--data.sources=[a", ["is not a YAML value; put it in quotes"]),
}


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    before = sorted(os.listdir())
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert err.startswith("[FT-CFG-0")
    assert "\n  → " in err
    assert sorted(os.listdir()) == before
    return err


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("case", FILES)
@pytest.mark.parametrize("verb", ["validate", "train", "index"])
def test_a_broken_file_is_refused_with_place_and_remedy(
    case: str, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data, place, said = FILES[case]
    Path("c.yaml").write_bytes(data)
    err = refused([verb, "c.yaml"], capsys)
    assert f"{place}: " in err
    for words in said:
        assert words in err


@pytest.mark.parametrize("case", FLAGS)
@pytest.mark.parametrize("argv", [["validate", "c.yaml"], ["train"], ["index"], ["evaluate", "x", "--index", "y"]])
def test_a_broken_flag_is_refused_by_name(case: str, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("c.yaml").write_text("training: {batch_size: 2}\n")
    flag, said = FLAGS[case]
    err = refused([argv[0], flag, *argv[1:]], capsys)
    assert f"{flag}: " in err
    for words in said:
        assert words in err


def test_a_flag_without_a_value_says_how_to_write_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert "write --training.lr=VALUE" in refused(["train", "--training.lr", "1e-4"], capsys)


@pytest.mark.parametrize(
    ("path", "said"), [("nowhere/c.yaml", "no such file"), (".", "a folder"), ("a/../b", "no such")]
)
def test_a_path_that_is_no_file_is_refused(path: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    err = refused(["validate", path], capsys)
    assert f"{path}: " in err
    assert said in err


@pytest.mark.parametrize("argv", [["validate", "c.yaml"], ["train", "c.yaml"]])
def test_the_command_itself_exits_with_2_and_no_traceback(argv: list[str], tmp_path: Path) -> None:
    Path("c.yaml").write_text("training:\n  batch_size: 0\n")
    done = subprocess.run([sys.executable, "-m", "flextrain.cli.main", *argv], capture_output=True, text=True)
    assert done.returncode == 2
    assert "c.yaml:2:15: " in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == ["c.yaml"]
