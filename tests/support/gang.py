"""Ranks that stay: worlds that are started once and then do one thing after another, as `run_ranks` does a single one.

A rank that raises or hangs fails what was asked, and the world starts anew with the next thing.
"""

import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from flextrain.world import World
from tests.support.ranks import start_ranks

TIMEOUT_S = 60.0


class Gang:
    """`size` ranks, `local_size` of them on a node."""

    def __init__(self, size: int, local_size: int | None = None) -> None:
        self.size, self._local_size = size, local_size
        self._ranks: list[Any] = []

    def start(self, body: Callable[..., Any], *args: Any) -> None:
        """Have every rank run body(world, *args); `results` waits for it."""
        if not self._ranks:
            ours, theirs = zip(*(Pipe() for _ in range(self.size)), strict=True)
            self._ranks = start_ranks(self.size, obey, theirs, local_size=self._local_size)
            self._pipes = ours
            for pipe in theirs:
                pipe.close()
        for pipe in self._pipes:
            pipe.send((body, args))

    def results(self) -> list[Any]:
        """What each rank returned, in order."""
        outcomes = [pipe.recv() if pipe.poll(TIMEOUT_S) else (False, "no answer") for pipe in self._pipes]
        errors = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
        if errors:
            self.end()
        assert not errors, "\n".join(errors)
        return [value for _, value in outcomes]

    def run(self, body: Callable[..., Any], *args: Any) -> list[Any]:
        self.start(body, *args)
        return self.results()

    def end(self) -> None:
        for process, _ in self._ranks:
            process.kill()
            process.join()
        self._ranks = []


def obey(world: World, pipes: list[Connection]) -> None:
    while True:
        body, args = pipes[world.rank].recv()
        try:
            outcome = True, body(world, *args)
        except BaseException:
            outcome = False, traceback.format_exc()
        pipes[world.rank].send(outcome)
