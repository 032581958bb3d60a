"""Writers as forks of a server that has everything imported, each with a plan of where in its life it is killed.

`with forked_writers([Kill(at=9)]):` makes the first `Writer` process that is started die at its ninth touch of the
disk, and all later ones live.
"""

import os
import select
import signal
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import current_process, forkserver, parent_process, reduction
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any
from unittest import mock

from flextrain.checkpoint import requests, writer
from tests.support.points import Points
from tests.support.ranks import _context
from tests.support.subject import small_chunks


@dataclass(frozen=True)
class Kill:
    """SIGKILL at a touch (see `Points`); with `trainer`, that one is killed too, and the writer `lag` touches later."""

    at: int
    when: str = "before"
    trainer: bool = False
    lag: int = 0


class Fd:
    """A descriptor on its way into another process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> Any:
        return _arrive, (reduction.DupFd(self._fd),)


def _arrive(fd: Any) -> int:
    return fd.detach()  # type: ignore[no-any-return]


def _live(pipe: int, arena: int, kill: Kill | None, trainer: int) -> None:
    small_chunks()
    if kill is None:
        return writer.serve(Connection(pipe), arena)

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def strike() -> None:
        with suppress(ProcessLookupError):
            os.kill(trainer, signal.SIGKILL)
        if not kill.lag:
            die()

    if not kill.trainer:
        with Points(kill.at, die, kill.when):
            return writer.serve(Connection(pipe), arena)
    with Points(kill.at + kill.lag, die), Points(kill.at, strike, kill.when):
        return writer.serve(Connection(pipe), arena)


def _runs_already() -> None:
    """A process that the server forked knows its address, but takes it for dead and would start another."""


class Forked:
    """Stands in for subprocess.Popen, as far as a Writer uses it."""

    def __init__(self, pass_fds: tuple[int, int], kill: Kill | None) -> None:
        pipe, arena = pass_fds
        if parent_process():
            forkserver._forkserver.ensure_running = _runs_already  # type: ignore[attr-defined]
            current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children of its own
        self._process = _context.Process(target=_live, args=(Fd(pipe), Fd(arena), kill, os.getpid()))
        self._process.start()
        self.pid = self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("writer", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


@contextmanager
def forked_writers(kills: Iterable[Kill | None] = ()) -> Iterator[list[Forked]]:
    """In here, writers are forks; those yielded are all that were started."""
    plan, started = iter(kills), []

    def start(command: list[str], pass_fds: tuple[int, int], env: dict[str, str]) -> Forked:
        started.append(Forked(pass_fds, next(plan, None)))
        return started[-1]

    stand_in = SimpleNamespace(Popen=start, TimeoutExpired=subprocess.TimeoutExpired)
    with mock.patch.object(requests, "subprocess", stand_in):
        yield started


def wait_for_end(pid: int, timeout_s: float = 60.0) -> None:
    """Of a process that is no child of ours."""
    with suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        poller = select.poll()  # select() takes no descriptor beyond 1023
        poller.register(fd, select.POLLIN)
        assert poller.poll(timeout_s * 1000), "the writer outlives its trainer"
        os.close(fd)
