"""The event log: one JSON line per call, one file per process, so that nobody waits for anybody.

    {"run","attempt","rank","node","incarnation","t": unix seconds,"kind":
        "start", "experiment", "config"        |  "metrics", "step", "metrics": {name: value}
        "event", "name", "fields": {…}         |  "close", "status"}

Infinity and NaN, which JSON lacks, are written as strings, and `read_events` turns them back into numbers.
"""

import json
import math
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from flextrain.tracking.tracker import AGENT_RANK, RunInfo

SUFFIX = ".jsonl"
IDENTITY: dict[str, type] = {"run": str, "attempt": int, "rank": int, "node": int, "incarnation": str}
KINDS: dict[str, dict[str, type]] = {
    "start": {"experiment": str, "config": dict},
    "metrics": {"step": int, "metrics": dict},
    "event": {"name": str, "fields": dict},
    "close": {"status": str},
}


def event_path(folder: Path, run: RunInfo) -> Path:
    """The file that the process `run` describes appends to."""
    who = f"node-{run.node:04d}" if run.rank == AGENT_RANK else f"rank-{run.rank:05d}"
    return folder / f"{who}.{run.incarnation}{SUFFIX}"


class EventLog:
    """Tracker that appends to a file. Each line is a single write, so a SIGKILL tears at most the last one; threads
    of a process may share it; after `close` it writes no more. Raises OSError where the disk does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        self._prefix = ""
        self._lock = threading.Lock()
        self._torn = False

    def start(self, run: RunInfo) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._torn = os.fstat(self._fd).st_size > 0  # an earlier process may have been cut off inside a line
        values = (run.run_id, run.attempt, run.rank, run.node, run.incarnation)
        self._prefix = json.dumps(dict(zip(IDENTITY, values, strict=True)))[:-1]
        self._append({"kind": "start", "experiment": run.experiment, "config": run.config})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._append({"kind": "metrics", "step": step, "metrics": dict(metrics)})

    def event(self, name: str, /, **fields: Any) -> None:
        self._append({"kind": "event", "name": name, "fields": fields})

    def close(self, status: str) -> None:
        self._append({"kind": "close", "status": status})
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1

    def _append(self, record: dict[str, Any]) -> None:
        tail = _to_json(record)[1:]
        with self._lock:
            if self._fd < 0:
                return
            line = f'{self._prefix}, "t": {time.time():.6f}, {tail}\n'.encode()
            if self._torn:
                line = b"\n" + line  # readers skip the broken line before it
            self._torn = os.write(self._fd, line) < len(line)


_encode = json.JSONEncoder(allow_nan=False, check_circular=False, default=lambda value: _plain(value)).encode


def _to_json(record: dict[str, Any]) -> str:
    try:
        return _encode(record)
    except ValueError:  # NaN or infinity somewhere: rare, so only then walk the record
        return _encode(_without_nan(record))


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    value = _plain(value) if hasattr(value, "item") else value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch as Python's; anything else as text."""
    return value.item() if hasattr(value, "item") else str(value)


class ObjectStore(Protocol):
    """What is needed of flextrain.storage.Store (which this room does not import)."""

    @property
    def local_root(self) -> Path | None: ...
    def list(self, prefix: str = "") -> Iterable[Any]: ...
    def get(self, key: str) -> bytes: ...
    def put(self, key: str, data: bytes) -> None: ...


def read_events(source: Path | ObjectStore) -> Iterator[dict[str, Any]]:
    """Every whole line of every event file right below a folder or store, file by file in order of name.

    Torn lines and lines that are no event are skipped; a folder that does not exist has none. Order within a file
    is the order of writing. Raises StorageError where a store cannot be read.
    """
    for lines in _files(source):
        for line in lines:
            event = parse(line)
            if event is not None:
                yield event


def _files(source: Path | ObjectStore) -> Iterator[Iterable[bytes]]:
    if isinstance(source, Path):
        for path in event_files(source):
            with path.open("rb") as file:
                yield file
    else:
        for entry in source.list():
            if entry.key.endswith(SUFFIX) and "/" not in entry.key:
                yield source.get(entry.key).splitlines()


def event_files(folder: Path) -> list[Path]:
    """The event files right below `folder`, by name."""
    return sorted(folder.glob(f"*{SUFFIX}"))


def parse(line: bytes) -> dict[str, Any] | None:
    """One line as an event whose fields have the types above, or None where it is torn or something else."""
    try:
        event = json.loads(line)
        event["t"] = float(event["t"])
        if event["kind"] == "metrics":
            event["metrics"] = {name: float(value) for name, value in event["metrics"].items()}
        shape = IDENTITY | KINDS[event["kind"]]
        sound = math.isfinite(event["t"]) and all(isinstance(event[key], kind) for key, kind in shape.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return event if sound else None


def upload_events(folder: Path, store: ObjectStore) -> int:
    """Copy event files that grew since the last call; returns how many.

    The store's own listing says how far it is: nothing is remembered here, and only whole lines are copied. A store
    that is this very folder is left alone, since its files are still being appended to. Raises StorageError.
    """
    root = store.local_root
    if root is not None and root.resolve() == folder.resolve():
        return 0
    known = {entry.key: entry.size_bytes for entry in store.list()}
    uploaded = 0
    for path in event_files(folder):
        if path.stat().st_size <= known.get(path.name, 0):
            continue
        data = path.read_bytes()
        data = data[: data.rfind(b"\n") + 1]
        if len(data) > known.get(path.name, 0):
            store.put(path.name, data)
            uploaded += 1
    return uploaded
