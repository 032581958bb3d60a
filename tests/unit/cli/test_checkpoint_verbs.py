"""`flextrain checkpoint …` on runs as training leaves them: what it finds, says, refuses and removes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.support.s3 import Bucket, bucket, s3_endpoint  # noqa: F401 (fixtures)
from tests.support.saved import save_now
from torch import nn

from flextrain.checkpoint import Catalog
from flextrain.checkpoint.manifest import Manifest, ObjectEntry, Shard, TensorEntry
from flextrain.cli.main import main
from flextrain.storage import open_store

VERBS = ["ls", "show", "verify", "gc", "export", "import"]


def save(root: str | Path, *steps: int) -> None:
    """Checkpoints of a small model below `root`."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for step in steps:
        state = {"position": step * 8, "loss": 1.5, "config": {"main": {"seed": 0}}}
        save_now(root, model, optimizer, step, state)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment of two runs; one of them has an unfinished attempt. Read only."""
    root = tmp_path_factory.mktemp("exp")
    save(root / "a" / "checkpoints", 5, 10)
    save(root / "b" / "checkpoints", 20)
    leave_behind(root / "b" / "checkpoints" / "step-00000025" / "feed")
    (root / "a" / "events").mkdir()
    (root / "a" / "events" / "rank-00000.beef.jsonl").touch()
    return root


def leave_behind(attempt: Path, age_s: float = 0.0) -> None:
    attempt.mkdir(parents=True)
    (attempt / "rank-00000.bin").write_bytes(b"half")
    os.utime(attempt / "rank-00000.bin", (attempt.stat().st_mtime - age_s,) * 2)


Said = pytest.CaptureFixture[str]


def rows(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines()]


def test_ls_lists_what_lies_below_an_experiment(runs: Path, capsys: Said) -> None:
    assert main(["checkpoint", "ls", str(runs)]) == 0
    header, *found = rows(capsys.readouterr().out)
    assert header == ["step", "size", "world", "age", "state", "checkpoint"]
    assert [(row[0], row[-2], row[-1]) for row in found] == [
        ("5", "committed", "a/checkpoints/step-00000005"),
        ("10", "committed", "a/checkpoints/step-00000010"),
        ("20", "committed", "b/checkpoints/step-00000020"),
        ("25", "unfinished", "b/checkpoints/step-00000025"),
    ]


@pytest.mark.parametrize("place", ["a", "a/checkpoints", "a/checkpoints/step-00000010"])
def test_ls_takes_a_run_and_a_checkpoint(runs: Path, place: str, capsys: Said) -> None:
    assert main(["checkpoint", "ls", str(runs / place)]) == 0
    assert rows(capsys.readouterr().out)[-1][-1].endswith("step-00000010")


def test_show_tells_the_facts_of_the_newest(runs: Path, capsys: Said) -> None:
    assert main(["checkpoint", "show", str(runs / "a"), "--tensors"]) == 0
    out = capsys.readouterr().out
    assert f"checkpoint  {runs}/a/checkpoints/step-00000010\n" in out
    assert "world size  1\n" in out
    assert "tensors     4 (8 weights)\n" in out
    assert "position    80\n" in out
    assert f"digest      {Catalog(open_store(runs / 'a' / 'checkpoints')).manifest(10).digest}\n" in out
    assert ["float32", "2x3", "1", "shards", "model.weight"] in rows(out)


def test_verify_reads_every_byte_of_every_checkpoint(tmp_path: Path, capsys: Said) -> None:
    save(tmp_path, 1, 2, 3)
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    assert [row[0] for row in rows(capsys.readouterr().out)] == ["sound"] * 3
    data = next(tmp_path.glob("step-00000002/*/rank-00000.bin"))
    raw = bytearray(data.read_bytes())
    raw[3] ^= 1
    data.write_bytes(raw)
    assert main(["checkpoint", "verify", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert [row[0] for row in rows(out)] == ["sound", "UNSOUND", "sound"]
    assert err.startswith(f"[FT-CKP-006] {data} differs from its hash")
    data.unlink()
    assert main(["checkpoint", "verify", str(tmp_path / "step-00000002")]) == 2
    assert "is missing" in capsys.readouterr().err


def test_gc_removes_old_checkpoints_and_leftovers_per_run(tmp_path: Path, capsys: Said) -> None:
    save(tmp_path / "a", 1, 2, 3)
    save(tmp_path / "b", 1)
    leave_behind(tmp_path / "a" / "step-00000009" / "dead", age_s=7200)
    leave_behind(tmp_path / "a" / "step-00000009" / "live")
    leave_behind(tmp_path / "a" / "step-00000003" / "lost")
    argv = ["checkpoint", "gc", str(tmp_path), "--keep-last", "2"]
    before = sorted(tmp_path.rglob("*"))
    assert main([*argv, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert out == said.replace("would go", "removed")
    assert f"{tmp_path}/a: 1 checkpoints and 2 leftovers removed, 2 checkpoints stay\n" in out
    assert Catalog(open_store(tmp_path / "a")).steps() == [2, 3]
    assert Catalog(open_store(tmp_path / "b")).steps() == [1]
    assert [path.name for path in (tmp_path / "a" / "step-00000009").iterdir()] == ["live"]
    assert not (tmp_path / "a" / "step-00000001").exists()
    assert not list((tmp_path / "a").glob(".spare/*")), "the space is freed"
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0


def test_gc_without_keep_last_leaves_every_checkpoint(tmp_path: Path, capsys: Said) -> None:
    save(tmp_path, 1, 2)
    assert main(["checkpoint", "gc", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: 0 checkpoints and 0 leftovers removed, 2 checkpoints stay\n"
    assert main(["checkpoint", "gc", str(tmp_path / "step-00000001"), "--keep-last", "1"]) == 2
    assert "[FT-CKP-027]" in capsys.readouterr().err
    assert Catalog(open_store(tmp_path)).steps() == [1, 2]


def test_gc_keeps_the_best_and_every_kth(tmp_path: Path, capsys: Said) -> None:
    save(tmp_path, 1, 2, 3, 4, 5)
    argv = ["checkpoint", "gc", str(tmp_path), "--keep-every", "4", "--keep-best", "1"]
    assert main(argv) == 2
    assert "[FT-CKP-028]" in capsys.readouterr().err
    assert main([*argv, "--keep-last", "1", "--metric", "los"]) == 2
    assert "the numbers there are: loss, position" in capsys.readouterr().err
    assert Catalog(open_store(tmp_path)).steps() == [1, 2, 3, 4, 5]
    assert main([*argv, "--keep-last", "1", "--metric", "position", "--mode", "min"]) == 0
    assert Catalog(open_store(tmp_path)).steps() == [1, 4, 5]


@pytest.mark.parametrize(("kind", "file"), [("safetensors", "model.safetensors"), ("dcp", ".metadata")])
def test_export_writes_the_newest(runs: Path, tmp_path: Path, kind: str, file: str, capsys: Said) -> None:
    out = tmp_path / "out"
    save(tmp_path / "run", 4)
    for manifest in (tmp_path / "run").rglob("manifest.json"):
        body = Manifest.from_json(manifest.read_bytes(), "here")
        manifest.write_bytes(Manifest(**{**vars(body), "state": {}}).to_json())  # as of a model without configuration
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(out), "--format", kind]) == 0
    assert f"wrote       {out}/{file}\n" in capsys.readouterr().out
    assert (out / file).exists()
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(out), "--format", kind]) == 2
    assert "[FT-CKP-024]" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["safetensors", "dcp"])
def test_what_was_exported_can_be_imported_shown_and_exported_again(tmp_path: Path, kind: str, capsys: Said) -> None:
    save(tmp_path / "run", 4)
    for manifest in (tmp_path / "run").rglob("manifest.json"):
        body = Manifest.from_json(manifest.read_bytes(), "here")
        manifest.write_bytes(Manifest(**{**vars(body), "state": {"step": 4}}).to_json())
    out, new = str(tmp_path / "out"), str(tmp_path / "new")
    assert main(["checkpoint", "export", str(tmp_path / "run"), out, "--format", kind]) == 0
    assert main(["checkpoint", "import", out, new]) == 0
    assert f"checkpoint  {new}/step-00000004\nholds " in capsys.readouterr().out
    assert main(["checkpoint", "verify", new]) == 0
    assert main(["checkpoint", "show", new, "--tensors"]) == 0
    assert "model.weight" in capsys.readouterr().out
    assert main(["checkpoint", "export", new, f"{out}2", "--format", kind]) == 0
    assert main(["checkpoint", "import", out, new, "--format", kind]) == 2
    assert "[FT-CKP-020]" in capsys.readouterr().err
    assert main(["checkpoint", "import", str(tmp_path / "run"), new]) == 2
    assert "[FT-CKP-062]" in capsys.readouterr().err


@pytest.mark.parametrize("verb", [["ls"], ["show"], ["verify"], ["gc"], ["export", "out", "--format", "dcp"]])
def test_where_nothing_is_every_verb_says_so(verb: list[str], tmp_path: Path, capsys: Said) -> None:
    (tmp_path / "notes.txt").touch()
    name, *rest = verb
    for place in (tmp_path, tmp_path / "missing"):
        assert main(["checkpoint", name, str(place), *rest]) == 2
        assert capsys.readouterr().err.startswith("[FT-CKP-004] there is no")
    assert main(["checkpoint", name, str(tmp_path / "notes.txt"), *rest]) == 2
    assert "is a file" in capsys.readouterr().err


def test_a_damaged_manifest_is_listed_as_such_and_not_shown(tmp_path: Path, capsys: Said) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-00000001" / "manifest.json").write_text("{}")
    assert main(["checkpoint", "ls", str(tmp_path)]) == 0
    assert rows(capsys.readouterr().out)[1][-2] == "damaged"
    for verb in ("show", "verify"):
        assert main(["checkpoint", verb, str(tmp_path)]) == 2
        assert "[FT-CKP-001]" in capsys.readouterr().err


def test_a_hostile_manifest_steers_no_terminal(tmp_path: Path, capsys: Said) -> None:
    evil = "model.\x1b]0;owned\x07"
    name = "abc/rank-00000.bin"
    tensors = {evil: TensorEntry.of("uint8", (0,), (Shard(name, 0, (0,), (0,)),))}
    hostile = Manifest(1, "abc\x1b[2J", 1, {evil: "\x9b31m"}, tensors, {name: ObjectEntry(0, ())})
    open_store(tmp_path / "step-00000001").put("manifest.json", hostile.to_json())
    open_store(tmp_path / "step-00000001").put(name, b"")
    assert main(["checkpoint", "ls", str(tmp_path)]) == 0
    assert main(["checkpoint", "show", str(tmp_path), "--tensors"]) == 0
    out = capsys.readouterr().out
    assert "owned" in out
    assert all(character.isprintable() or character == "\n" for character in out)


def test_in_a_bucket(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Said) -> None:  # noqa: F811
    for key, value in bucket.environ.items():
        monkeypatch.setenv(key, value)
    save(f"{bucket.url}/exp/run/checkpoints", 1, 2)
    assert main(["checkpoint", "verify", f"{bucket.url}/exp"]) == 0
    assert main(["checkpoint", "gc", f"{bucket.url}/exp", "--keep-last", "1"]) == 0
    capsys.readouterr()
    assert main(["checkpoint", "ls", f"{bucket.url}/exp"]) == 0
    assert [row[0] for row in rows(capsys.readouterr().out)] == ["step", "2"]
    assert all("step-00000002" in key for key in bucket.keys("exp/run/checkpoints"))


def test_help_teaches_by_example_and_imports_nothing_heavy() -> None:
    for verb in [[], *([verb] for verb in VERBS)]:
        code = (
            f"import sys\nfrom flextrain.cli.main import main\ntry: main(['checkpoint', *{verb}, '--help'])\n"
            "except SystemExit: pass\n"
            "sys.exit(', '.join({'pydantic', 'yaml', 'torch', 'obstore'} & set(sys.modules)) or 0)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert f"examples:\n  flextrain {' '.join(['checkpoint', *verb])}" in done.stdout
        assert "--section.key=value" not in done.stdout


def test_looking_needs_no_torch(runs: Path) -> None:
    code = (
        "import sys\nfrom flextrain.cli.main import main\n"
        "for verb in ('ls', 'show'): assert main(['checkpoint', verb, sys.argv[1]]) == 0\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(runs)], capture_output=True).returncode == 0


def test_mistakes_in_the_command_are_exit_2(runs: Path, capsys: Said) -> None:
    assert main(["checkpoint"]) == 2
    assert "commands:" in capsys.readouterr().err
    assert main(["checkpoint", "ls", str(runs), "--main.seed=1"]) == 2
    assert "`flextrain checkpoint ls` does not take this" in capsys.readouterr().err
    assert main(["checkpoint", "gc", str(runs), "--keep=1"]) == 2
    assert "Did you mean `--keep-last`" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["checkpoint", "gc", str(runs), "--keep-last", "0"])
    assert caught.value.code == 2
