"""Benchmarks keep running: tiny shapes through the same functions, and the arithmetic of their claims."""

import importlib
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest
from tests.support.s3 import Bucket, bucket, s3_endpoint

__all__ = ["bucket", "s3_endpoint"]
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SOURCE = BENCHMARKS.parent / "src"


@pytest.fixture(autouse=True)
def benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.fixture
def common() -> ModuleType:
    return importlib.import_module("common")


def test_a_claim_knows_whether_it_is_met(
    common: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claims = [common.Claim("a", 2.0, "%", "<= 2"), common.Claim("b", 0.9, "x", ">= 1"), common.Claim("c", 5.0, "s")]
    common.report(claims, tmp_path / "claims.json")
    written = json.loads((tmp_path / "claims.json").read_text())
    assert [claim["met"] for claim in written["claims"]] == [True, False, None]
    assert set(written["claims"][0]) == {"name", "value", "unit", "goal", "met"}
    assert "MISSED" in capsys.readouterr().out


def test_repetitions_take_turns(common: ModuleType) -> None:
    calls: list[str] = []

    def body(name: str) -> int:
        calls.append(name)
        return len(calls)

    assert common.interleave({"a": lambda: body("a"), "b": lambda: body("b")}, 3) == {"a": [1, 3, 5], "b": [2, 4, 6]}
    assert calls == list("ababab")
    assert common.Spread.of([3.0, 1.0, 2.0]) == common.Spread(2.0, 1.0, 3.0)


def test_trainer_benchmark_compares_the_same_work(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = importlib.import_module("trainer")
    tiny = trainer.NEXT_TO_NOTHING
    claims = [*trainer.measure_overhead(tiny, 4, 1), *trainer.measure_throughput(tiny, 4, 1)]
    names = " ".join(claim.name for claim in claims)
    assert trainer.OWN in names
    assert trainer.HUB in names
    assert (trainer.THEIRS in names) != ("skipped: transformers Trainer" in capsys.readouterr().out)


def test_trainer_benchmark_refuses_to_compare_different_work(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = importlib.import_module("trainer")
    right = trainer.bare_loop
    monkeypatch.setattr(trainer, "bare_loop", lambda *args: (loss * 1.001 for loss in right(*args)))
    with pytest.raises(SystemExit, match="not the same work"):
        trainer.run_beside(trainer.NEXT_TO_NOTHING, 4)


def test_first_run_counts_overlapping_work_once() -> None:
    first_run = importlib.import_module("first_run")
    run = first_run.Run(
        10.0, 20.0, {"index": [(1.0, 3.0)], "train": [(5.0, 12.0), (6.0, 14.0)], "eval": [(15.0, 16.0)]}
    )
    assert run.busy_s(10.0) == 2 + 5
    assert run.busy_s(20.0) == 2 + 9 + 1
    stages = first_run.stages(run)
    assert stages.pop("in all, to the first loss") == sum(stages.values()) == 10.0


@pytest.mark.parametrize(
    "line", ["step   1/150  █░  loss 8.3170  lr 1.00e-03", "[17/train/3 (pid 5)] step 1/3  ░  loss 5.5 lr"]
)
def test_first_run_knows_the_first_loss(line: str) -> None:
    first_run = importlib.import_module("first_run")
    assert first_run.FIRST_LOSS.search(line)
    assert not first_run.FIRST_LOSS.search(line.replace(" 1/", " 11/"))


def test_checkpoint_benchmark_measures_every_ratio_on_two_ranks(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), str(SOURCE)]), "OMP_NUM_THREADS": "1"}
    flags = ["--state-mb", "3", "--repetitions", "1", "--ranks", "2", "--folder", str(tmp_path)]
    script = [sys.executable, str(BENCHMARKS / "checkpoint.py"), *flags, "--json", str(tmp_path / "claims.json")]
    subprocess.run(script, env=environ, check=True, stdout=subprocess.PIPE)
    found = {claim["name"]: claim["value"] for claim in json.loads((tmp_path / "claims.json").read_text())["claims"]}
    assert found.keys() == {f"2 rank(s): {name}" for name in importlib.import_module("checkpoint").RATIOS}
    assert all(value > 0 for value in found.values())


def test_checkpoint_benchmark_measures_memory_and_training(tmp_path: Path) -> None:
    subject = importlib.import_module("checkpoint_subject")
    memory = importlib.import_module("checkpoint_memory")
    made = subject.Subject.make(subject.shape_of(3.0))
    save, load = memory.during_save(made, tmp_path / "memory"), memory.during_load(made, tmp_path / "memory")
    assert save["state_bytes"] == load["state_bytes"] == made.size_bytes
    assert save["extra_bytes"] > 2 * made.size_bytes, "two slots are touched at the start"
    args = Namespace(threads=1, state_mb=3.0, repetitions=1)
    claims = importlib.import_module("checkpoint").measure_training(tmp_path, args)
    assert [claim.unit for claim in claims] == ["ms", "%"]


def test_scale_benchmark_commits_what_many_ranks_signed_off(tmp_path: Path) -> None:
    scale = importlib.import_module("checkpoint_scale")
    shapes = scale.llama_70b(layers=1)
    claims = {claim.name: claim for claim in scale.measure(str(tmp_path), 40, shapes, 2)}
    assert claims["40 ranks commit and are validated"].goal == "<= 2"
    assert claims["shards in it"].value == 3 * len(shapes) * 40 + len(shapes)
    assert claims["manifest"].value < 0.1
    assert len(scale.llama_70b()) == 723


def test_object_store_benchmark_moves_the_same_bytes_as_the_others(bucket: Bucket, tmp_path: Path) -> None:
    environ = {**os.environ, **bucket.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), str(SOURCE)])}
    flags = ["--endpoint", bucket.endpoint, "--objects", "2", "--object-mb", "1", "--repetitions", "1"]
    script = [sys.executable, str(BENCHMARKS / "object_store.py"), *flags, "--json", str(tmp_path / "claims.json")]
    subprocess.run(script, env=environ, check=True, stdout=subprocess.PIPE)
    claims = json.loads((tmp_path / "claims.json").read_text())["claims"]
    rates = {claim["name"]: claim["value"] for claim in claims if claim["goal"] is None}
    assert {f"{way}: {name}" for way in ("up", "down") for name in ("ours", "boto3")} <= rates.keys()
    assert [claim["goal"] for claim in claims if claim["goal"]] == [">= 95", ">= 95"]
    left = [found["Name"] for found in bucket.client().list_buckets()["Buckets"]]
    assert bucket.name in left
    assert not [name for name in left if name.startswith("benchmark-")], "its own bucket is still there"


def test_resume_benchmark_loads_what_it_saved(tmp_path: Path) -> None:
    resume = importlib.import_module("resume")
    claims = resume.measure(tmp_path / "root", 3.0, 1)
    assert [claim.unit for claim in claims] == ["s", "s"]
    with pytest.raises(SystemExit, match="holds no checkpoint"):
        resume.resume_here(tmp_path / "empty", 3.0)
