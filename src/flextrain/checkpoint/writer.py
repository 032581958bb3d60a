"""The writer: a process of its own that makes snapshots durable, as `requests.Writer` asks it to.

`python -m flextrain.checkpoint.writer PIPE ARENA PARENT` (two descriptors and a pid) maps the arena, persists one
snapshot at a time, signs off, and commits (rank 0) or waits for the commit (the others). Where the node has a disk for
it, a snapshot is staged there first, which frees its slot, and uploaded from there while the next one is staged. The
writer imports no torch and never shares the trainer's interpreter, so hashing and writing never make a step wait. It
ends when its trainer does.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from multiprocessing.connection import Connection
from queue import Queue
from threading import Lock, Thread
from typing import Any

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
from flextrain.checkpoint.requests import Request
from flextrain.checkpoint.staging import Staging, spoilt
from flextrain.checkpoint.transfer import Bandwidth
from flextrain.errors import FlextrainError
from flextrain.log import get_logger
from flextrain.processes import die_with_parent
from flextrain.storage import open_store

log = get_logger(__name__)
NICENESS = 5  # where cores are short, training comes first; where they are not, nothing is lost


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
