"""What a trainer asks of the process that writes its checkpoints, and its handle to that process."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import flextrain
from flextrain.checkpoint.arena import Arena
from flextrain.checkpoint.retention import Keep
from flextrain.checkpoint.tiers import STRAIGHT, Route
from flextrain.errors import CheckpointError, FlextrainError, unpack

LIVES = 5
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
    def unanswered(self) -> list[str]:
        """Attempts that this rank's part of is under way."""
        return [request.attempt for request in self._pending]

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
