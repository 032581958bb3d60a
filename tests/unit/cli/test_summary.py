from flextrain.cli.summary import evaluation_summary, run_summary
from flextrain.config import Config
from flextrain.cost import CostReport, build_report
from flextrain.evaluate.report import EvalReport
from flextrain.flowkit import CheckpointRef, TrainRef

TRAINED = TrainRef(
    CheckpointRef("/r/e/17/checkpoints/step-00000150", 150, "d"), 3.25, 150, "/r/e/17/events", "", "17/train/3"
)
REPORT = EvalReport(3.2, 24.5, 1.75, 0.41, 6.1, 0.07, 8.3, 262_144, 150)


def cost(attempts: int) -> CostReport:
    identity = {"run": "17", "rank": -1, "node": 0}
    events = []
    for attempt in range(attempts):
        who = {**identity, "attempt": attempt, "incarnation": str(attempt)}
        events.append({**who, "t": 0.0, "kind": "event", "name": "state", "fields": {"state": "useful"}})
        events.append({**who, "t": 3600.0, "kind": "event", "name": "beat", "fields": {}})
    return build_report(Config().cost, events)


def test_the_summary_names_results_places_and_commands() -> None:
    text = run_summary("17", TRAINED, REPORT, cost(1))
    rows = {line.split("  ")[1]: line for line in text.splitlines() if line.startswith("  ")}
    assert "1.750" in rows["bits per byte"]
    assert "unigram 7.00%" in rows["accuracy"]
    assert "$0.096" in rows["paid"]
    assert rows["checkpoint"].endswith("/r/e/17/checkpoints/step-00000150")
    for command in ("card view 17/train/3", "card view 17/evaluate", "card view 17/cost_report", "--checkpoint-resume"):
        assert command in text


def test_a_run_that_was_interrupted_says_so() -> None:
    assert "2 attempts" in run_summary("17", TRAINED, REPORT, cost(2))
    assert "2 attempts" not in run_summary("17", TRAINED, REPORT, cost(1))


def test_columns_are_aligned() -> None:
    lines = evaluation_summary(REPORT).splitlines()
    assert (
        len({line.index(value) for line, value in zip(lines, ("3.2000", "1.750", "24.50", "41.00%"), strict=True)}) == 1
    )
