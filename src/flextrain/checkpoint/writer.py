"""The writer: a process of its own that makes snapshots durable, and the trainer's handle to it.

`python -m flextrain.checkpoint.writer PIPE ARENA PARENT` (two descriptors and a pid) maps the arena, persists one
snapshot at a time, signs off, and commits (rank 0) or waits for the commit (the others). Where the node has a disk for
it, a snapshot is staged there first, which frees its slot, and uploaded from there while the next one is staged. The
writer imports no torch and never shares the trainer's interpreter, so hashing and writing never make a step wait. It
ends when its trainer does.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Queue
from threading import Lock, Thread
from typing import Any

import flextrain
from flextrain.checkpoint.arena import Arena, Layout
from flextrain.checkpoint.catalog import Catalog
from flextrain.checkpoint.commit import (
    Attempt,
    await_commit,
    commit,
    explained,
    sign_off,
    signed_off,
)
from flextrain.checkpoint.generation import leased
from flextrain.checkpoint.parts import Part, part_of
from flextrain.checkpoint.persist import persist
from flextrain.checkpoint.retention import Keep
from flextrain.checkpoint.staging import Staging, spoilt
from flextrain.checkpoint.tiers import STRAIGHT, Route
from flextrain.checkpoint.transfer import Bandwidth
from flextrain.errors import CheckpointError, FlextrainError, unpack
from flextrain.log import get_logger
from flextrain.processes import die_with_parent
from flextrain.storage import open_store

log = get_logger(__name__)
LIVES = 5
NICENESS = 5  # where cores are short, training comes first; where they are not, nothing is lost
CLOSE_GRACE_S = 10.0  # to finish a save under way; it may wait for ranks that are gone


@dataclass(frozen=True)
class Request:
    """Persist `slot` as `rank`'s part of an attempt at the catalog `root`, by its `route`.

    With `nvme_only` it stays there. `staged` says that an earlier life of the writer has brought it there already: by
    now the slot may hold another snapshot.
    """

    root: str
    slot: int
    step: int
    attempt: str
    rank: int
    world_size: int
    keep: Keep
    timeout_s: float
    state: dict[str, Any]
    route: Route = STRAIGHT
    nvme_only: bool = False
    staged: bool = False

    @classmethod
    def from_json(cls, text: bytes) -> "Request":
        body = json.loads(text)
        return cls(**{**body, "keep": Keep(**body["keep"]), "route": Route(**body["route"])})


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is where it was to go, or the error that it ended with; `seconds` from request to reply.

    With `staged` it is the first of two answers: the slot is free, the upload is under way.
    """

    step: int
    slot: int
    attempt: str
    seconds: float
    size_bytes: int = 0
    digest: str = ""
    staged: bool = False
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
        self._deaths = 0
        error = unpack(body.pop("error")) if "error" in body else None
        saved = Saved(**body, error=error)
        place = next(i for i, request in enumerate(self._pending) if request.attempt == saved.attempt)
        if saved.staged:
            self._pending[place] = replace(self._pending[place], staged=True)
        else:
            self._pending.pop(place)
        return saved

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
        return Saved(lost.step, lost.slot, lost.attempt, 0.0, error=_died(lost)) if lost else None

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
    """Answer requests until the other end closes; what is being written then is finished."""
    body = json.loads(pipe.recv_bytes())
    Service(pipe, Arena(Layout.from_dict(body), body["slots"], fd)).run()


class Service:
    """Takes requests in order. One snapshot is staged while the one before is uploaded; a third waits in its slot."""

    def __init__(self, pipe: Connection, arena: Arena) -> None:
        self._pipe, self._arena = pipe, arena
        self._speaking, self._closed = Lock(), False
        self._uploads: Queue[tuple[Request, float] | None] = Queue(maxsize=1)
        self._busy: set[str] = set()  # attempts on their way through the node's disk

    def run(self) -> None:
        uploads = Thread(target=self._upload)
        uploads.start()
        with suppress(EOFError, OSError):  # the trainer is gone, or wants no more
            while True:
                self._take(Request.from_json(self._pipe.recv_bytes()), time.perf_counter())
        self._closed = True
        self._uploads.put(None)
        uploads.join()

    def _take(self, request: Request, began_s: float) -> None:
        if request.route.nvme is None:
            self._say(request, began_s, self._outcome(request, finish))
            return
        self._busy.add(request.attempt)
        if request.nvme_only:
            answer = self._outcome(request, stage)
            self._retire(request)
            self._say(request, began_s, answer)
        else:
            self._uploads.put((request if request.staged else self._stage(request, began_s), began_s))

    def _stage(self, request: Request, began_s: float) -> Request:
        """What is to be uploaded then: from the node's disk, or straight from memory where that disk fails."""
        try:
            self._say(request, began_s, {**stage(request, self._arena), "staged": True})
        except Exception as error:
            log.warning("step %d goes straight to the store, since it could not be staged: %s", request.step, error)
            return replace(request, route=replace(request.route, nvme=None))
        return request

    def _upload(self) -> None:
        while (item := self._uploads.get()) and not self._closed:
            request, began_s = item
            answer = self._outcome(request, finish)
            self._retire(request)
            self._say(request, began_s, answer)

    def _retire(self, request: Request) -> None:
        self._busy.discard(request.attempt)
        if request.route.nvme:
            try:
                Staging(request.route.nvme).retire(request.rank, set(self._busy))
            except OSError as error:
                log.warning("%s could not be tidied: %s", request.route.nvme, error)

    def _outcome(self, request: Request, action: Callable[[Request, Arena], dict[str, Any]]) -> dict[str, Any]:
        try:
            return action(request, self._arena)
        except Exception as error:  # a writer that dies of one would be started anew, and die of it again
            return {"error": explained(error, f"rank {request.rank} could not save step {request.step}").pack()}

    def _say(self, request: Request, began_s: float, answer: dict[str, Any]) -> None:
        head = {"step": request.step, "slot": request.slot, "attempt": request.attempt}
        with self._speaking, suppress(OSError):  # the trainer may be gone, and with it the one who asked
            self._pipe.send_bytes(json.dumps({**head, **answer, "seconds": time.perf_counter() - began_s}).encode())


def save(request: Request, arena: Arena) -> dict[str, Any]:
    """All of a save, one thing after the other. Raises FlextrainError, after telling the other ranks."""
    staged = stage(request, arena) if request.route.nvme else {}
    return staged if request.nvme_only else finish(request, arena)


def stage(request: Request, arena: Arena) -> dict[str, Any]:
    """Bring a snapshot to the node's disk, where it is not there yet. Raises FlextrainError or OSError."""
    assert request.route.nvme
    staging, attempt = Staging(request.route.nvme), _attempt(request)
    staged = staging.find(attempt, request.rank)  # by an earlier life of this writer
    if staged is None:
        staged = staging.put(attempt, request.rank, request.state, arena.layout, arena.slot(request.slot))
    return {"size_bytes": sum(entry.size_bytes for entry in staged.part.objects.values())}


def finish(request: Request, arena: Arena) -> dict[str, Any]:
    """Bring a snapshot to the store, sign off, and see the attempt committed. Raises FlextrainError, after telling the
    other ranks."""
    with leased(open_store(request.root), request.attempt, request.rank):
        return _finish(request, arena)


def _finish(request: Request, arena: Arena) -> dict[str, Any]:
    catalog, attempt = Catalog(open_store(request.root)), _attempt(request)
    part = signed_off(catalog, attempt, request.rank)  # by an earlier life of this writer
    if part is None:
        try:
            part = (
                _upload(catalog, attempt, request) if request.route.nvme else _persist(catalog, attempt, request, arena)
            )
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


def _attempt(request: Request) -> Attempt:
    return Attempt(request.step, request.attempt, request.world_size)


def _persist(catalog: Catalog, attempt: Attempt, request: Request, arena: Arena) -> Part:
    layout, name = arena.layout, attempt.data(request.rank)
    if not layout.size_bytes:
        return Part()
    folder = catalog.folder(request.step)
    return part_of(
        layout, name, persist(catalog.store, folder, name, arena.slot(request.slot), layout.size_bytes, _limit(request))
    )


def _upload(catalog: Catalog, attempt: Attempt, request: Request) -> Part:
    """From the node's disk to the store. What the disk gave back must be what was staged."""
    assert request.route.nvme
    staging = Staging(request.route.nvme)
    staged = staging.find(attempt, request.rank)
    if staged is None:
        raise spoilt(f"step {request.step}", "its record is gone")
    for name, entry in staged.part.objects.items():
        memory = staging.open(staged)
        if (
            persist(catalog.store, catalog.folder(request.step), name, memory, entry.size_bytes, _limit(request))
            != entry
        ):
            raise spoilt(name, "the disk gave back other bytes")
    return staged.part


def _limit(request: Request) -> Bandwidth | None:
    rate = request.route.upload_bytes_per_s
    return _bandwidth(rate) if rate else None


@cache
def _bandwidth(bytes_per_s: float) -> Bandwidth:
    """One for the life of this process, so that an upload which follows another does not begin with a burst."""
    return Bandwidth(bytes_per_s)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[3]))
    os.nice(NICENESS)
    serve(Connection(int(sys.argv[1])), int(sys.argv[2]))
