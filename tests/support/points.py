"""Every place where a save or a load touches the disk or a store, as a countable point where something can happen.

`with Points(at=7, act=raise_eio):` runs `act` at the seventh touch. A point is hit before the touch, after it, or in
the middle, where that can be (a write of which a part arrived). All of it is deterministic.
"""

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import obstore

TOUCHES = [
    *((os, name) for name in ("open", "pwrite", "preadv", "fsync", "ftruncate", "rename", "mkdir")),
    *((obstore, name) for name in ("put", "get", "get_range", "head", "list", "delete")),
]
WRITES = {"pwrite", "fsync", "ftruncate", "rename", "mkdir", "put"}
WHEN = ("before", "half", "after")


class Points:
    """Counts touches while entered; `seen` names them. `again` acts at all later touches too, as a full disk does."""

    def __init__(
        self,
        at: int = 0,
        act: Callable[[], None] = lambda: None,
        when: str = "before",
        only: set[str] | None = None,
        again: bool = False,
    ) -> None:
        """Act at touch number `at`, counted from 1, of those named in `only` (default: all); 0 only counts."""
        self.at, self.act, self.when, self.only, self.again = at, act, when, only, again
        self.seen: list[str] = []
        self._busy = False
        self._lock = threading.Lock()

    def __enter__(self) -> "Points":
        self._stack = ExitStack()
        for module, name in TOUCHES:
            if self.only is None or name in self.only:
                self._stack.enter_context(mock.patch.object(module, name, self._touch(name, getattr(module, name))))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def _touch(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def touch(*args: Any, **kwargs: Any) -> Any:
            if not self._hit(name):
                return real(*args, **kwargs)
            if self.when == "after":
                try:
                    return real(*args, **kwargs)
                finally:
                    self._do()
            if self.when == "half" and name == "pwrite":
                fd, data, offset = args
                real(fd, data[: len(data) // 2 // 512 * 512], offset)
            self._do()
            return real(*args, **kwargs)

        return touch

    def _hit(self, name: str) -> bool:
        with self._lock:
            if self._busy:
                return False
            self.seen.append(name)
            return len(self.seen) == self.at or (self.again and 0 < self.at < len(self.seen))

    def _do(self) -> None:
        self._busy = True
        try:
            self.act()
        finally:
            self._busy = False
