"""Benchmarks keep running: tiny shapes through the same functions, and the arithmetic of their claims."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


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
