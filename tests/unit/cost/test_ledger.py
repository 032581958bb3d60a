"""Every paid microsecond is in exactly one state, whatever happened to the nodes, their clocks and their files."""

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.ledger_lines import Life, Line

from flextrain.cost.ledger import Ledger, read_ledger
from flextrain.tracking import AGENT_RANK, read_events
from flextrain.tracking.names import State, Status

STATES = st.sampled_from([*State])
SECOND_US = 10**6


def seconds(ledger: Ledger) -> dict[str, float]:
    return {state.value: us / SECOND_US for state, us in ledger.us_by_state.items() if us}


def check_conservation(ledger: Ledger) -> None:
    """No state is negative, spans adjoin without overlap, and states sum to paid time exactly."""
    assert sum(ledger.us_by_state.values()) == ledger.paid_us
    assert 0 <= ledger.startup_us <= ledger.us_by_state[State.RESTART]
    for life in ledger.incarnations:
        assert all(span.us > 0 for span in life.spans)
        assert all(a.end_us == b.begin_us and a.state != b.state for a, b in pairwise(life.spans))


def test_agent_and_first_rank_tell_the_states_of_a_node() -> None:
    life = Life().enters(0, "restart").enters(5_000, "useful", rank=4).enters(20_000, "checkpoint", rank=4)
    life.enters(21_000, "useful", rank=4).enters(30_000, "idle", rank=4).closes(30_500, rank=4).closes(31_000)
    life.enters(6_000, "eval", rank=5)  # not the first rank: unheard
    ledger = read_ledger(life.lines)
    assert seconds(ledger) == {"restart": 5, "useful": 24, "checkpoint": 1, "idle": 1}
    assert ledger.paid_us == 31 * SECOND_US
    assert (ledger.attempts, ledger.interruptions, ledger.killed) == (1, 0, 0)


def test_a_killed_node_is_paid_until_its_last_line_whoever_wrote_it() -> None:
    life = Life().enters(0, "restart").enters(1_000, "useful", rank=0).beats(2_000).steps(2_700, 1, 64.0, rank=3)
    ledger = read_ledger(life.lines)
    assert seconds(ledger) == {"restart": 1, "useful": 1.7}
    assert (ledger.killed, ledger.interruptions) == (1, 1)


def test_a_dead_rank_leaves_the_word_to_its_agent() -> None:
    life = Life().enters(0, "restart").enters(1_000, "useful", rank=0).enters(4_000, "restart")
    life.enters(6_000, "replay", rank=0).enters(7_000, "useful", rank=0).closes(9_000, Status.FAILED)
    assert seconds(read_ledger(life.lines)) == {"restart": 3, "useful": 5, "replay": 1}


def test_without_an_agent_the_rank_tells_it_all() -> None:
    life = Life().enters(0, "restart", rank=0).enters(2_000, "useful", rank=0).closes(5_000, rank=0)
    ledger = read_ledger(life.lines)
    assert seconds(ledger) == {"restart": 2, "useful": 3}
    assert ledger.interruptions == 0


def test_time_before_the_first_state_belongs_to_it_and_time_without_any_or_an_unknown_one_is_idle() -> None:
    late = Life().says(0, "start").enters(3_000, "index").closes(5_000)
    silent = Life(incarnation="b").says(0, "start").beats(2_000)
    strange = Life(incarnation="c").enters(0, "useful").enters(1_000, "dreaming").beats(4_000)
    ledger = read_ledger(late.lines + silent.lines + strange.lines)
    assert seconds(ledger) == {"index": 5, "idle": 5, "useful": 1}


def test_lives_of_a_node_that_overlap_are_two_machines_and_both_are_paid() -> None:
    old = Life(incarnation="a").enters(0, "useful").beats(10_000)
    new = Life(incarnation="b", attempt=1).enters(8_000, "restart").enters(9_000, "useful").closes(20_000)
    together, apart = read_ledger(old.lines + new.lines), [read_ledger(old.lines), read_ledger(new.lines)]
    assert together.paid_us == sum(ledger.paid_us for ledger in apart) == 22 * SECOND_US
    check_conservation(together)


def test_nodes_lost_together_are_one_interruption_and_index_and_eval_are_no_attempts() -> None:
    index = Life(0, "i").enters(0, "index").closes(1_000)
    lost = [Life(node, "a").enters(1_000, "restart").enters(2_000, "useful").beats(3_000) for node in (0, 1)]
    stopped = Life(2, "a").enters(1_000, "useful").closes(3_000, Status.FAILED)
    again = [Life(n, "b", 1).enters(4_000, "restart").enters(6_000, "useful").closes(9_000) for n in (0, 1, 2)]
    evaluation = Life(0, "e", attempt=7).enters(9_000, "eval").closes(9_500, Status.FAILED)
    ledger = read_ledger([line for life in [index, *lost, stopped, *again, evaluation] for line in life.lines])
    assert (ledger.attempts, ledger.interruptions, ledger.killed) == (2, 1, 2)
    assert len(ledger.incarnations) == 8
    assert ledger.startup_us == 2 * SECOND_US  # of the first attempt; the second's three times 2 s are the kill's doing


def test_a_restart_in_the_middle_of_a_life_is_no_startup() -> None:
    life = Life().enters(0, "restart").enters(2_000, "useful").enters(5_000, "restart").closes(9_000)
    assert read_ledger(life.lines).startup_us == 2 * SECOND_US


def test_no_events_make_an_empty_ledger() -> None:
    ledger = read_ledger([])
    assert (ledger.paid_us, ledger.attempts, ledger.startup_us) == (0, 0, 0)


@st.composite
def lives(draw: st.DrawFn) -> tuple[Life, dict[State, int], bool]:
    """A life told by an agent that beats and a rank that changes state, and the truth: milliseconds by state."""
    node, attempt = draw(st.integers(0, 3)), draw(st.integers(0, 2))
    life, truth = Life(node, draw(st.uuids()).hex, attempt), dict.fromkeys(State, 0)
    now, before = draw(st.integers(0, 10**7)), State.RESTART
    life.enters(now, before)
    for state, stay, beat in draw(st.lists(st.tuples(STATES, st.integers(1, 10**6), st.integers(0, 10**6)))):
        life.beats(now + beat % (stay + 1)).enters(now + stay, state, rank=node)
        truth[before] += stay
        now, before = now + stay, state
    closed = draw(st.booleans())
    if closed:
        life.closes(now)
    return life, truth, closed


@given(st.lists(lives(), max_size=4))
def test_the_ledger_is_the_truth(many: list[tuple[Life, dict[State, int], bool]]) -> None:
    ledger = read_ledger([line for life, _, _ in many for line in life.lines])
    check_conservation(ledger)
    assert ledger.us_by_state == {state: 1000 * sum(truth[state] for _, truth, _ in many) for state in State}
    assert ledger.killed == sum(not closed for _, _, closed in many)


ANY_LINE = st.builds(
    lambda life, t_ms, rank, kind, state: (
        Life(*life).enters(t_ms, state, rank) if kind == "state" else getattr(Life(*life), kind)(t_ms, rank=rank)
    ).lines[0],
    life=st.tuples(st.integers(0, 1), st.sampled_from("ab"), st.integers(0, 1)),
    t_ms=st.integers(0, 20),
    rank=st.sampled_from([AGENT_RANK, 0, 1]),
    kind=st.sampled_from(["state", "beats", "closes"]),
    state=STATES,
)


@given(st.lists(ANY_LINE, max_size=40))
def test_any_lines_at_all_conserve_time(lines: list[Line]) -> None:
    """Clocks that jump both ways, closes in the middle, lives that overlap."""
    ledger = read_ledger(lines)
    check_conservation(ledger)
    for life in ledger.incarnations:
        own = [line["t"] for line in lines if (line["node"], line["incarnation"]) == (life.node, life.name)]
        extent_us = round(1e6 * max(own)) - round(1e6 * min(own))
        assert sum(span.us for span in life.spans) <= extent_us


@given(st.lists(ANY_LINE, min_size=1, max_size=20), st.data())
def test_lines_that_come_again_change_nothing(lines: list[Line], data: st.DataObject) -> None:
    again = data.draw(st.lists(st.sampled_from(range(len(lines))), max_size=20))
    twice = [*lines, *(lines[i] for i in again)]
    assert read_ledger(twice) == read_ledger(lines)


@given(st.lists(ANY_LINE, max_size=20), st.data())
def test_how_files_are_interleaved_does_not_matter(lines: list[Line], data: st.DataObject) -> None:
    files: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        files.setdefault((line["node"], line["incarnation"], line["rank"]), []).append(line)
    shuffled = [line for file in data.draw(st.permutations(list(files.values()))) for line in file]
    a, b = read_ledger(lines), read_ledger(shuffled)
    assert [(life.name, life.spans, life.status) for life in a.incarnations] == [
        (life.name, life.spans, life.status) for life in b.incarnations
    ]


@given(lives(), st.data())
def test_missing_lines_lose_no_balance_and_add_no_time(life: tuple[Life, Any, bool], data: st.DataObject) -> None:
    lines = life[0].lines
    kept = [line for line in lines if data.draw(st.booleans())]
    ledger = read_ledger(kept)
    check_conservation(ledger)
    assert ledger.paid_us <= read_ledger(lines).paid_us


@given(lives(), st.integers(0, 10**6), st.data())
def test_a_clock_set_back_makes_no_time(life: tuple[Life, Any, bool], back_ms: int, data: st.DataObject) -> None:
    lines = life[0].lines
    since = data.draw(st.integers(0, len(lines)))
    shifted = [line | {"t": line["t"] - back_ms / 1000 * (i >= since)} for i, line in enumerate(lines)]
    ledger = read_ledger(shifted)
    check_conservation(ledger)
    if since == 0 or back_ms == 0:
        assert ledger.paid_us == pytest.approx(read_ledger(lines).paid_us, abs=1)
    own_clock = [line["t"] for line in shifted]
    assert ledger.paid_us <= round(1e6 * max(own_clock)) - round(1e6 * min(own_clock))


def _write(folder: Path, lines: Sequence[Line]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for line in lines:
        with (folder / f"rank{line['rank']}.{line['incarnation']}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


@given(life=lives(), cut=st.integers(0, 10**6))
def test_files_torn_anywhere_conserve_time(
    life: tuple[Life, Any, bool], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("torn")
    _write(folder, life[0].lines)
    whole = read_ledger(read_events(folder))
    assert whole == read_ledger(life[0].lines)
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[: cut % (path.stat().st_size + 1)])
    torn = read_ledger(read_events(folder))
    check_conservation(torn)
    assert torn.paid_us <= whole.paid_us


def test_a_copy_that_lags_behind_its_original_changes_nothing(tmp_path: Path) -> None:
    life = Life().enters(0, "restart").enters(2_000, "useful").enters(5_000, "checkpoint").closes(9_000)
    _write(tmp_path, life.lines)
    (tmp_path / "zz-copy.jsonl").write_text("".join(json.dumps(line) + "\n" for line in life.lines[:2]))
    assert read_ledger(read_events(tmp_path)) == read_ledger(life.lines)


NODE = """
import sys
from pathlib import Path
from flextrain.tracking import AGENT_RANK, EventLog, RunInfo, event_path, names
folder = Path(sys.argv[1])
agent, rank = (RunInfo("exp", "run", 0, number, 0, "life") for number in (AGENT_RANK, 0))
logs = [EventLog(event_path(folder, run)) for run in (agent, rank)]
logs[0].start(agent), logs[1].start(rank)
logs[0].event(names.STATE, state="restart")
for step in range(1, 10**9):
    logs[1].event(names.STATE, state="useful")
    logs[1].log(step, {names.TOKENS: 64.0})
    logs[1].event(names.STATE, state="checkpoint")
    logs[0].event(names.BEAT)
    if step == 300:
        print("going", flush=True)
"""


def test_a_node_that_was_really_killed_is_paid_to_its_last_line(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", NODE, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "going\n"
        process.kill()
        assert process.wait() == -9
    events = list(read_events(tmp_path))
    ledger = read_ledger(events)
    check_conservation(ledger)
    (life,) = ledger.incarnations
    times = [event["t"] for event in events]
    assert ledger.paid_us == round(1e6 * max(times)) - round(1e6 * min(times))
    assert life.status is None
    assert {span.state for span in life.spans} == {State.RESTART, State.USEFUL, State.CHECKPOINT}
    assert len(life.spans) >= 600
