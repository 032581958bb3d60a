import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from metaflow.cards import BlankCard, Markdown
from metaflow.plugins import CARDS

from flextrain.config import Config
from flextrain.cost import CostReport, build_report
from flextrain.flowkit.cards import REFRESH_S, OfflineCard, TrainingCard, cost_components, evaluation_components

IDENTITY = {"run": "r", "attempt": 0, "rank": 0, "node": 0, "incarnation": "a", "t": 1.0}
REPORT = {
    "loss": 3.2,
    "perplexity": 24.5,
    "bits_per_byte": 1.75,
    "accuracy": 0.41,
    "unigram_loss": 6.1,
    "unigram_accuracy": 0.07,
    "uniform_loss": 8.3,
    "tokens": 262_144,
    "step": 150,
    "samples": [{"prompt": "def ", "text": "f(x):\n    return '<script>alert(1)</script>'"}],
}


class Card:
    """Metaflow's card as a list that counts refreshes."""

    def __init__(self) -> None:
        self.components: dict[str, Any] = {}
        self.refreshes = 0

    def append(self, component: Any, id: str) -> None:
        assert id not in self.components
        component.component_id = id
        self.components[id] = component

    def refresh(self) -> None:
        self.refreshes += 1

    def text(self) -> str:
        return json.dumps([component.render() for component in self.components.values()])


def write_plan(folder: Path, last_step: int) -> None:
    folder.mkdir(exist_ok=True)
    plan = {**IDENTITY, "kind": "event", "name": "plan", "fields": {"last_step": last_step}}
    (folder / "rank-00000.a.jsonl").write_text(json.dumps(plan) + "\n")


def write_steps(folder: Path, steps: range, incarnation: str = "a") -> None:
    folder.mkdir(exist_ok=True)
    metrics = {"train/loss": 3.25, "train/step_seconds": 2.0, "train/tokens_per_second": 1500.0}
    with (folder / f"rank-00000.{incarnation}.jsonl").open("a") as file:
        for step in steps:
            file.write(json.dumps({**IDENTITY, "kind": "metrics", "step": step, "metrics": metrics}) + "\n")


def test_the_training_card_shows_what_rank_0_recorded(tmp_path: Path) -> None:
    card = Card()
    training = TrainingCard(card, tmp_path / "events", attempt=1, clock=lambda: 0.0)
    write_plan(tmp_path / "events", last_step=100)
    write_steps(tmp_path / "events", range(1, 41))
    training.refresh(now=True)
    assert card.components["progress-1"].render()["value"] == 40
    assert card.components["progress-1"].render()["details"] == "step 40/100, 1.5k tokens/s, 2:00 left"
    assert len(card.components["loss-1"].render()["spec"]["data"]["values"]) == 40
    assert "Training, attempt 2" in card.text()
    assert "3.2500" in card.components["notes-1"].render()["source"]


def test_ticks_between_refreshes_cost_nothing(tmp_path: Path) -> None:
    now = [0.0]
    card = Card()
    training = TrainingCard(card, tmp_path, clock=lambda: now[0])
    for _ in range(100):
        training.refresh()
    assert card.refreshes == 1
    now[0] = REFRESH_S
    training.refresh()
    assert card.refreshes == 2


def test_a_card_that_fails_does_not_stop_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Card):
        def refresh(self) -> None:
            raise OSError("disk full")

    training = TrainingCard(Broken(), tmp_path)
    with caplog.at_level("WARNING", logger="flextrain.cards"):
        training.refresh(now=True)
        training.refresh(now=True)
    assert [record.message for record in caplog.records] == [
        "the training card is no longer updated: OSError: disk full"
    ]


def test_a_run_whose_end_is_not_known_yet_shows_no_share(tmp_path: Path) -> None:
    card = Card()
    training = TrainingCard(card, tmp_path)
    write_steps(tmp_path, range(1, 3))
    training.refresh(now=True)
    assert card.components["progress-0"].render()["value"] == 0
    assert "at step 2" in card.components["notes-0"].render()["source"]


def test_samples_are_shown_verbatim_and_not_as_markup() -> None:
    components = evaluation_components(REPORT)
    rendered = [component.render() for component in components]
    assert rendered[-1]["type"] == "pythonCode"
    assert rendered[-1]["data"] == REPORT["samples"][0]["prompt"] + REPORT["samples"][0]["text"]  # type: ignore[index]
    assert not any(
        isinstance(component, Markdown) and "<script>" in json.dumps(component.render()) for component in components
    )


def test_every_figure_stands_beside_its_baselines() -> None:
    table = next(c.render() for c in evaluation_components(REPORT) if type(c).__name__ == "Table")
    assert ["loss (nats per token)", "3.2000", "6.1000", "8.3000"] in table["data"]
    assert ["accuracy", "41.00%", "7.00%", "–"] in table["data"]


def cost_report() -> CostReport:
    """Two nodes of ten seconds: one works throughout, one restarts for half of it."""
    spoken = [(0, 0.0, "useful"), (0, 10.0, None), (1, 0.0, "restart"), (1, 5.0, "useful"), (1, 10.0, None)]
    events: list[dict[str, Any]] = []
    for node, t, state in spoken:
        entered = {"kind": "event", "name": "state", "fields": {"state": state}}
        what = entered if state else {"kind": "close", "status": "finished"}
        events.append({**IDENTITY, "rank": -1, "node": node, "incarnation": str(node), "t": t, **what})
    return build_report(Config().cost, events)


def test_the_cost_card_falls_from_on_demand_to_what_was_paid() -> None:
    report = cost_report()
    components = {type(c).__name__: c.render() for c in cost_components(report)}
    bars = components["VegaChart"]["spec"]["data"]["values"]
    assert bars[0]["name"] == "on-demand"
    assert bars[-1] == {"name": "paid", "from": 0.0, "to": pytest.approx(report.paid_usd), "kind": "level"}
    assert [row[:2] for row in components["Table"]["data"]] == [
        ["useful", "15.0 s"],
        ["restart", "5.0 s"],
        ["paid", "20.0 s"],
    ]


def test_cards_load_nothing_from_the_network() -> None:
    task = SimpleNamespace(pathspec="TrainFlow/1/train/3")
    components = [component.render() for component in evaluation_components(REPORT)]
    page = OfflineCard(components=components).render(task)
    assert re.search(r"@import|<link[^>]+http|src=.https?:", BlankCard(components=components).render(task))
    assert not re.search(r"@import|<link[^>]+http|src=.https?:", page)
    assert len(page) > 1_000_000  # scripts and styles are inside


def test_metaflow_knows_the_card_type() -> None:
    assert [card for card in CARDS if card.type == "flextrain"] == [OfflineCard]
