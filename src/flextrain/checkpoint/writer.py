"""The writer: a process of its own that makes snapshots durable, and the trainer's handle to it.

`python -m flextrain.checkpoint.writer PIPE ARENA PARENT` (two descriptors and a pid) maps the arena, persists one
snapshot at a time, signs off, and commits (rank 0) or waits for the commit (the others). It imports no torch and never
shares the trainer's interpreter, so hashing and writing never make a step wait. It ends when its trainer does.
"""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import flextrain
from flextrain.checkpoint.arena import Arena, Layout
from flextrain.checkpoint.catalog import Catalog
from flextrain.checkpoint.commit import Attempt, Part, await_commit, commit, explained, sign_off, signed_off
from flextrain.checkpoint.manifest import Shard
from flextrain.checkpoint.persist import persist
from flextrain.checkpoint.retention import Keep
from flextrain.errors import CheckpointError, FlextrainError, unpack
from flextrain.processes import die_with_parent
from flextrain.storage import open_store

LIVES = 5
CLOSE_GRACE_S = 10.0  # to finish a save under way; it may wait for ranks that are gone


@dataclass(frozen=True)
class Request:
    """Persist `slot` as `rank`'s part of an attempt at the catalog `root`."""

    root: str
    slot: int
    step: int
    attempt: str
    rank: int
    world_size: int
    keep: Keep
    timeout_s: float
    state: dict[str, Any]

    @classmethod
    def from_json(cls, text: bytes) -> "Request":
        body = json.loads(text)
        return cls(**{**body, "keep": Keep(**body["keep"])})


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint, or the error that it ended with; `seconds` from request to reply."""

    step: int
    slot: int
    seconds: float
    size_bytes: int = 0
    digest: str = ""
    error: FlextrainError | None = None


class Writer:
    """The trainer's end. Requests are answered in order; a writer that was killed is started anew and asked again."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._pending: list[Request] = []
        self._deaths = 0
        self._start()

    def _start(self) -> None:
        ours, theirs = Pipe()
        fds = (theirs.fileno(), self._arena.fd)
        layout = json.dumps({**self._arena.layout.to_dict(), "slots": self._arena.slots})
        command = [sys.executable, "-m", "flextrain.checkpoint.writer", *map(str, fds), str(os.getpid())]
        source = str(Path(flextrain.__file__).parents[1])
        path = os.pathsep.join(part for part in (source, os.environ.get("PYTHONPATH")) if part)
        environ = {**os.environ, "PYTHONPATH": path}
        self._process = subprocess.Popen(command, pass_fds=fds, env=environ)
        theirs.close()
        self._pipe = ours
        self._send(layout)

    def submit(self, request: Request) -> None:
        self._pending.append(request)
        self._send(json.dumps(asdict(request)))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def pending(self) -> int:
        return len(self._pending)

    def poll(self, timeout_s: float = 0.0) -> Saved | None:
        """The next answer, if it comes within `timeout_s`."""
        try:
            if not self._pending or not self._pipe.poll(timeout_s):
                return None
            body = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            return self._restart()
        self._pending.pop(0)
        self._deaths = 0
        error = unpack(body.pop("error")) if "error" in body else None
        return Saved(**body, error=error)

    def _restart(self) -> Saved | None:
        """Ask a new process for all that is unanswered: it goes on where the dead one stopped, and a commit that it had
        made already is found to be our own. A request that LIVES processes died of is given up."""
        self._process.wait()
        self._pipe.close()
        self._deaths += 1
        lost = self._pending.pop(0) if self._deaths == LIVES else None
        self._deaths %= LIVES
        self._start()
        for request in self._pending:
            self._send(json.dumps(asdict(request)))
        return Saved(lost.step, lost.slot, 0.0, error=_died(lost)) if lost else None

    def _send(self, text: str) -> None:
        with suppress(OSError):  # it died: the next poll notices, and asks its successor
            self._pipe.send_bytes(text.encode())

    def close(self) -> None:
        self._pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_GRACE_S)
        self._process.kill()
        self._process.wait()


def _died(request: Request) -> CheckpointError:
    return CheckpointError(
        f"rank {request.rank}: the process that writes checkpoints died {LIVES} times over step {request.step}",
        number=10,
        remedy="look at its output and at what ends processes here (memory); what was committed before is unharmed",
    )


def serve(pipe: Connection, fd: int) -> None:
    """Answer requests until the other end closes."""
    body = json.loads(pipe.recv_bytes())
    arena = Arena(Layout.from_dict(body), body["slots"], fd)
    while True:
        try:
            request = Request.from_json(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        began_s = time.perf_counter()
        answer: dict[str, Any] = {"step": request.step, "slot": request.slot}
        try:
            answer |= save(request, arena)
        except Exception as error:  # a writer that dies of one would be started anew, and die of it again
            answer["error"] = explained(error, f"rank {request.rank} could not save step {request.step}").pack()
        try:
            pipe.send_bytes(json.dumps({**answer, "seconds": time.perf_counter() - began_s}).encode())
        except OSError:
            return  # the trainer is gone, and with it the one who asked


def save(request: Request, arena: Arena) -> dict[str, Any]:
    """Persist, sign off, and see the attempt committed. Raises FlextrainError, after telling the other ranks."""
    catalog = Catalog(open_store(request.root))
    attempt = Attempt(request.step, request.attempt, request.world_size)
    part = signed_off(catalog, attempt, request.rank)  # by an earlier life of this writer
    if part is None:
        try:
            part = _persist(catalog, attempt, request, arena)
        except Exception as error:  # whatever it is, the other ranks wait for word of it
            part = explained(error, f"rank {request.rank} could not write step {request.step}")
        sign_off(catalog, attempt, request.rank, part)
    if isinstance(part, FlextrainError) and request.rank:
        raise part
    if request.rank == 0:
        manifest = commit(catalog, attempt, request.state, request.keep, request.timeout_s)
    else:
        manifest = await_commit(catalog, attempt, request.timeout_s)
    return {"size_bytes": manifest.size_bytes, "digest": manifest.digest}


def _persist(catalog: Catalog, attempt: Attempt, request: Request, arena: Arena) -> Part:
    layout, name = arena.layout, attempt.data(request.rank)
    if not layout.size_bytes:
        return Part([], {})
    folder = catalog.folder(request.step)
    entry = persist(catalog.store, folder, name, arena.slot(request.slot), layout.size_bytes)
    shards = [(p.name, p.dtype, p.full_shape, Shard(name, p.offset, p.start, p.box_shape)) for p in layout.places]
    return Part(shards, {name: entry})


if __name__ == "__main__":
    die_with_parent(int(sys.argv[3]))
    serve(Connection(int(sys.argv[1])), int(sys.argv[2]))
