from pathlib import Path

from flextrain.flowkit.tail import EventTail


def test_each_poll_returns_only_what_is_new(tmp_path: Path) -> None:
    tail = EventTail(tmp_path / "events", "rank-*.jsonl")
    assert tail.poll() == []
    (tmp_path / "events").mkdir()
    path = tmp_path / "events" / "rank-00000.a.jsonl"
    path.write_text('{"n": 1}\n{"n": 2}\n')
    assert [event["n"] for event in tail.poll()] == [1, 2]
    assert tail.poll() == []
    with path.open("a") as file:
        file.write('{"n": 3}\n')
    assert [event["n"] for event in tail.poll()] == [3]


def test_a_line_being_written_is_read_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.a.jsonl"
    tail = EventTail(tmp_path, "rank-*.jsonl")
    path.write_text('{"n": 1}\n{"n"')
    assert [event["n"] for event in tail.poll()] == [1]
    with path.open("a") as file:
        file.write(": 2}\n")
    assert [event["n"] for event in tail.poll()] == [2]


def test_torn_lines_and_other_files_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.a.jsonl").write_text('{"n": 1}\n{"torn\n7\n{"n": 2}\n')
    (tmp_path / "node-0000.a.jsonl").write_text('{"n": 9}\n')
    assert [event["n"] for event in EventTail(tmp_path, "rank-*.jsonl").poll()] == [1, 2]
