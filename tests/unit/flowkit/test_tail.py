import json
from pathlib import Path
from typing import Any

from flextrain.flowkit.tail import EventTail


def beat(n: int) -> str:
    who: dict[str, Any] = {"t": n, "run": "r", "attempt": 0, "rank": 0, "node": 0, "incarnation": "a"}
    return json.dumps({**who, "kind": "event", "name": "beat", "fields": {}})


def times(tail: EventTail) -> list[float]:
    return [event["t"] for event in tail.poll()]


def test_each_poll_returns_only_what_is_new(tmp_path: Path) -> None:
    tail = EventTail(tmp_path / "events", "rank-*.jsonl")
    assert tail.poll() == []
    (tmp_path / "events").mkdir()
    path = tmp_path / "events" / "rank-00000.a.jsonl"
    path.write_text(f"{beat(1)}\n{beat(2)}\n")
    assert times(tail) == [1, 2]
    assert tail.poll() == []
    with path.open("a") as file:
        file.write(f"{beat(3)}\n")
    assert times(tail) == [3]


def test_a_line_being_written_is_read_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.a.jsonl"
    tail = EventTail(tmp_path, "rank-*.jsonl")
    path.write_text(f"{beat(1)}\n{beat(2)[:9]}")
    assert times(tail) == [1]
    with path.open("a") as file:
        file.write(f"{beat(2)[9:]}\n")
    assert times(tail) == [2]


def test_torn_lines_and_other_files_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.a.jsonl").write_text(f'{beat(1)}\n{{"torn\n7\n{beat(2)}\n')
    (tmp_path / "node-0000.a.jsonl").write_text(beat(9) + "\n")
    assert times(EventTail(tmp_path, "rank-*.jsonl")) == [1, 2]
