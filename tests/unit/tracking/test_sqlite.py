"""Ingesting is incremental and idempotent, and keeps what was replayed."""

import multiprocessing
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flextrain.tracking import EventLog, RunInfo, event_path, names
from flextrain.tracking.sqlite import ingest

WRITERS, STEPS = 32, 50


def write(folder: Path, rank: int, attempt: int, steps: range, loss: float = 1.0) -> Path:
    run = RunInfo("exp", "run-1", attempt, rank, node=0, incarnation=f"life{attempt}")
    log = EventLog(event_path(folder, run))
    log.start(run)
    for step in steps:
        log.log(step, {names.LOSS: loss, names.TOKENS: 64.0})
    log.event(names.STATE, state="idle")
    log.close(names.Status.FINISHED)
    return log.path


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "db" / "run.sqlite"


def query(database: Path, sql: str) -> list[Any]:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute(sql).fetchall()


def dump(database: Path) -> list[Any]:
    return [query(database, f"SELECT * FROM {table}") for table in ("metrics", "events", "files")]


def test_a_second_ingest_reads_and_changes_nothing(tmp_path: Path, database: Path) -> None:
    write(tmp_path, 0, 0, range(1, 11))
    assert ingest(tmp_path, database) == 13
    first = dump(database)
    assert ingest(tmp_path, database) == 0
    assert dump(database) == first
    assert query(database, "SELECT count(*) FROM metrics") == [(20,)]
    assert query(database, "SELECT kind, name, fields FROM events WHERE kind = 'event'") == [
        ("event", "state", '{"state": "idle"}')
    ]


def test_only_what_was_added_is_read_and_half_a_line_waits(tmp_path: Path, database: Path) -> None:
    path = write(tmp_path, 0, 0, range(1, 11))
    whole = path.read_bytes()
    half = whole.index(b"\n", len(whole) // 2) + 20
    path.write_bytes(whole[:half])
    before = ingest(tmp_path, database)
    assert before == whole[:half].count(b"\n")
    path.write_bytes(whole)
    assert ingest(tmp_path, database) == whole.count(b"\n") - before
    in_pieces = dump(database)
    ingest(tmp_path, tmp_path / "at_once.sqlite")
    assert dump(tmp_path / "at_once.sqlite") == in_pieces


def test_replayed_steps_are_kept_and_the_last_attempt_wins(tmp_path: Path, database: Path) -> None:
    write(tmp_path, 0, 0, range(1, 8), loss=5.0)
    write(tmp_path, 0, 1, range(5, 11), loss=4.0)
    ingest(tmp_path, database)
    where = f"WHERE name = '{names.LOSS}'"
    assert query(database, f"SELECT count(*) FROM metrics {where}") == [(13,)]
    latest = query(database, f"SELECT step, attempt, value FROM metrics_latest {where} ORDER BY step")
    assert latest == [(step, 0, 5.0) for step in range(1, 5)] + [(step, 1, 4.0) for step in range(5, 11)]


def test_nan_becomes_null_and_broken_lines_are_passed_over(tmp_path: Path, database: Path) -> None:
    path = write(tmp_path, 0, 0, range(1, 3), loss=float("nan"))
    path.write_bytes(b"\xff broken\n" + path.read_bytes())
    assert ingest(tmp_path, database) == 5
    assert query(database, f"SELECT step, value FROM metrics WHERE name = '{names.LOSS}'") == [(1, None), (2, None)]


def _write_and_ingest(folder: Path, database: Path, rank: int) -> None:
    write(folder, rank, 0, range(1, STEPS + 1))
    if rank % 8 == 0:
        ingest(folder, database)


def _join(processes: list[multiprocessing.process.BaseProcess]) -> Iterator[int | None]:
    for process in processes:
        process.join()
        yield process.exitcode


def test_32_writers_and_4_ingesters_at_once_lose_no_row(tmp_path: Path, database: Path) -> None:
    fork = multiprocessing.get_context("fork")
    processes: list[multiprocessing.process.BaseProcess] = [
        fork.Process(target=_write_and_ingest, args=(tmp_path, database, rank)) for rank in range(WRITERS)
    ]
    for process in processes:
        process.start()
    assert set(_join(processes)) == {0}
    ingest(tmp_path, database)
    assert query(database, "SELECT count(*) FROM metrics") == [(2 * WRITERS * STEPS,)]
    assert query(database, "SELECT count(*) FROM events") == [(3 * WRITERS,)]
    assert query(database, "PRAGMA journal_mode") == [("wal",)]
