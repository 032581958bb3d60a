"""Figures are right, add up exactly, and can be recomputed from the JSON alone."""

import json
import pickle
import re
from datetime import date
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.ledger_lines import Life, Line

from flextrain.config.schema import Config, CostConfig, Price
from flextrain.cost import CostReport, Quote, build_report
from flextrain.cost.progress import Progress
from flextrain.errors import CostError
from flextrain.tracking.names import State, Status

PRICE = Price(
    instance_type="node", on_demand_usd_per_h=3.6, spot_usd_per_h=1.08, as_of=date(2026, 11, 1), source="a table"
)
SPOT = CostConfig(instance_type="node", capacity="spot", prices=[PRICE])


def disturbed_run() -> list[Line]:
    """Two nodes; both lost at 100 s, after step 8 of 10; a second attempt replays steps 6 to 8."""
    lives = [Life(0, "i").enters(-20_000, "index").closes(0), Life(0, "e").enters(180_000, "eval").closes(190_000)]
    for node in (0, 1):
        first = Life(node, "a").enters(0, "restart").enters(10_000, "useful", rank=node)
        for step in range(1, 9):
            first.steps(10_000 + 10_000 * step, step, 1000.0, rank=node)
        lives.append(first.beats(100_000))
        second = Life(node, "b", attempt=1).enters(110_000, "restart").enters(120_000, "replay", rank=node)
        for step in range(6, 11):
            second.steps(72_000 + 9_500 * step, step, 1000.0, rank=node)
            if step == 8:
                second.enters(150_000, "useful", rank=node)
        second.enters(168_000, "checkpoint", rank=node)
        lives.append(second.enters(169_000, "idle", rank=node).closes(170_000, rank=node).closes(170_000))
    return [line for life in lives for line in life.lines]


@pytest.fixture
def report() -> CostReport:
    return build_report(SPOT, disturbed_run())


def test_times_and_counts_of_a_disturbed_run(report: CostReport) -> None:
    training = {"useful": 216, "checkpoint": 2, "restart": 40, "replay": 60, "idle": 2}
    assert report.seconds_by_state == {**training, "index": 20, "eval": 10}
    assert report.node_hours == pytest.approx(350 / 3600)
    assert report.progress == Progress(steps=10, tokens=10_000, replayed_steps=3)
    assert (report.attempts, report.interruptions, report.incarnations, report.killed) == (2, 1, 6, 2)
    assert report.goodput == pytest.approx(216 / 320)


def test_money_of_a_disturbed_run(report: CostReport) -> None:
    """Spot is 0.3 millidollars per node-second, on-demand 1."""
    assert report.paid_usd == 0.105
    assert report.training_usd == 0.096
    assert report.usd_per_step == pytest.approx(0.0096)
    assert report.usd_per_million_tokens == pytest.approx(9.6)
    assert report.usd_by_state["replay"] == 0.018
    lost_s = 20 + 60 + 2  # the second start, the replay, the idling
    assert report.on_demand_usd == pytest.approx((350 - lost_s) * 0.001)
    assert report.lost_usd == pytest.approx(lost_s * 0.0003)
    assert report.savings == pytest.approx(1 - 0.105 / 0.268)
    assert report.waterfall() == [
        *[("on-demand", 0.268), ("spot discount", -0.1876)],
        *[("restart", 0.006), ("replay", 0.018), ("idle", 0.0006), ("paid", 0.105)],
    ]


def test_an_undisturbed_on_demand_run_saves_and_loses_nothing() -> None:
    life = Life().enters(0, "restart").enters(10_000, "useful").steps(20_000, 1, 64.0).closes(30_000)
    report = build_report(SPOT.model_copy(update={"capacity": "on_demand"}), life.lines)
    assert (report.savings, report.lost_usd) == (0.0, 0.0)
    assert report.waterfall() == [("on-demand", 0.03), ("paid", 0.03)]


USD_PER_H = st.integers(1, 10**6).map(lambda n: n / 10**4)
REPORTS = st.builds(
    CostReport,
    quote=st.builds(Quote, st.just("n"), st.just("spot"), USD_PER_H, USD_PER_H, st.dates(), st.text()),
    node_us=st.fixed_dictionaries({state.value: st.integers(0, 10**14) for state in State}),
    startup_us=st.just(0),
    attempts=st.integers(0, 9),
    incarnations=st.integers(0, 9),
    killed=st.integers(0, 9),
    interruptions=st.integers(0, 9),
    progress=st.builds(Progress, st.integers(0, 10**7), st.integers(0, 10**12), st.integers(0, 99)),
)


def nano(usd: float) -> int:
    return round(usd * 10**9)


@given(REPORTS)
def test_money_adds_up_to_the_nanodollar(report: CostReport) -> None:
    paid = nano(report.paid_usd)
    assert sum(map(nano, report.usd_by_state.values())) == paid
    assert all(usd >= 0 for usd in report.usd_by_state.values())
    *steps, (label, total) = report.waterfall()
    assert (label, nano(total)) == ("paid", paid)
    assert sum(nano(usd) for _, usd in steps) == paid
    assert report.paid_usd == pytest.approx(report.node_hours * report.quote.usd_per_h, abs=1e-9, rel=1e-12)


@given(REPORTS)
def test_json_gives_the_same_report_back(report: CostReport) -> None:
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    again = CostReport.from_dict(values)
    assert again == report
    assert again.to_dict() == report.to_dict()
    assert report.summary() == again.summary()


def test_every_figure_follows_from_the_terms_by_its_documented_formula(report: CostReport) -> None:
    d: dict[str, Any] = json.loads(json.dumps(report.to_dict()))
    us, quote, progress = d["node_us"], d["quote"], d["progress"]
    rate, paid_us = quote["usd_per_h"] / 3.6e9, sum(us.values())
    lost_us = us["restart"] - d["startup_us"] + us["replay"] + us["idle"]
    training_us = paid_us - us["index"] - us["eval"]
    expected = {
        "paid_usd": paid_us * rate,
        "training_usd": training_us * rate,
        "lost_usd": lost_us * rate,
        "on_demand_usd": (paid_us - lost_us) * quote["on_demand_usd_per_h"] / 3.6e9,
        "savings": 1 - d["paid_usd"] / d["on_demand_usd"],
        "usd_per_step": d["training_usd"] / progress["steps"],
        "usd_per_million_tokens": d["training_usd"] / progress["tokens"] * 1e6,
        "node_hours": paid_us / 3.6e9,
        "goodput": us["useful"] / training_us,
    }
    assert {name: d[name] for name in expected} == pytest.approx(expected)
    assert d["usd_by_state"] == pytest.approx({state: n * rate for state, n in us.items()})
    assert d["seconds_by_state"] == {state: n / 1e6 for state, n in us.items()}
    assert set(d) - set(expected) == {
        *("quote", "node_us", "startup_us", "attempts", "incarnations", "killed", "interruptions", "progress"),
        *("usd_by_state", "seconds_by_state", "waterfall"),
    }


@pytest.mark.parametrize("values", [{}, {"quote": 3}, {"quote": {"as_of": "today"}}])
def test_what_is_no_report_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(CostError, match="no cost report") as raised:
        CostReport.from_dict(values)
    assert raised.value.code == "FT-CST-003"


def test_a_report_travels_as_an_artifact(report: CostReport) -> None:
    assert report.paid_usd
    assert pickle.loads(pickle.dumps(report)) == report


def test_no_events_are_an_error_with_a_remedy() -> None:
    with pytest.raises(CostError, match="no events") as raised:
        build_report(SPOT, iter([]))
    assert (raised.value.code, bool(raised.value.remedy)) == ("FT-CST-002", True)


def test_a_run_that_only_began_has_a_report_without_ratios() -> None:
    report = build_report(SPOT, Life().says(0, "start").lines)
    assert (report.paid_usd, report.goodput, report.savings) == (0, None, None)
    assert (report.usd_per_step, report.usd_per_million_tokens) == (None, None)
    assert "goodput" in report.summary()


def test_the_last_attempt_says_how_many_tokens_a_step_had() -> None:
    first = Life().steps(0, 1, 10.0).steps(1_000, 2, 20.0).steps(1_000, 2, 99.0, rank=1).beats(2_000)
    second = Life(0, "b", 1).steps(3_000, 2, 30.0).closes(4_000, Status.FINISHED)
    report = build_report(SPOT, second.lines + first.lines)
    assert report.progress == Progress(steps=2, tokens=40, replayed_steps=1)


def test_a_laptop_run_of_a_minute_does_not_read_as_free() -> None:
    life = Life().enters(0, "restart").enters(10_000, "useful").enters(29_500, "checkpoint").enters(30_000, "useful")
    for step in range(1, 151):
        life.steps(10_000 + 300 * step, step, 4096.0)
    text = build_report(Config().cost, life.closes(60_000).lines).summary()
    amounts = [word for word in re.split(r"[\s/)]+", text) if word.startswith("$")]
    assert len(amounts) >= 9
    assert [word for word in amounts if float(word[1:]) == 0] == ["$0.00"]  # nothing was lost


def test_the_summary_says_what_was_paid_for_and_at_which_price(report: CostReport) -> None:
    assert report.summary() == SUMMARY


SUMMARY = """\
Cost of this run: $0.1050  (5:50 of node time at $1.08/h)

  state       node time   share     cost
  useful           3:36   61.7%  $0.0648
  checkpoint      2.0 s    0.6%  $0.0006
  restart        40.0 s   11.4%  $0.0120
  replay           1:00   17.1%  $0.0180
  idle            2.0 s    0.6%  $0.0006
  index          20.0 s    5.7%  $0.0060
  eval           10.0 s    2.9%  $0.0030
  paid             5:50  100.0%  $0.1050

  per step            $0.00960  10 steps of training, 3 done again
  per million tokens     $9.60  10k tokens
  on-demand            $0.2680  $3.60/h, without restarts, replay and idle time
  saved                  60.8%  of on-demand
  lost                 $0.0246  to 1 interruption and waiting
  goodput                67.5%  useful of all training time
  node-hours            0.0972  2 attempts, 6 node lives, 2 killed

node spot, as of 2026-11-01: a table"""
