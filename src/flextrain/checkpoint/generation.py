"""Generations: who may commit below a root. Each run of a gang claims the next one, and fences all before it.

<root>/generations/00000007.json     created if absent: the claim, and who made it
<root>/generations/00000007.lease    written anew while its rank 0 saves: there is a live writer

An attempt carries its generation in its name (g00000007-…). Rank 0 looks for a newer claim right before it creates a
manifest, and refuses where there is one. A look and a creation are two things: a writer that stands still just between
them can commit after it was superseded. That is one more checkpoint of the same trajectory, whole (see `verdict` in
commit.py), at a step that nobody had committed; the run that took over is told, if it ever comes to that step.
"""

import json
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from flextrain.errors import AlreadyExists, CheckpointError, StorageError
from flextrain.storage import Entry, Store

FOLDER = "generations"
RENEW_S = 30.0
LEASE_S = 4 * RENEW_S  # without renewal for so long there is no live writer, as far as anybody can tell
KEPT = 3  # records of generations, for a person to look at
RECORD = re.compile(FOLDER + r"/(\d{8,})\.(json|lease)")
ATTEMPT = re.compile(r"g(\d{8,})-.+")


@dataclass(frozen=True)
class Standing:
    """The newest generation claimed, and when its lease was renewed last (None: never)."""

    number: int
    renewed_s: float | None = None

    def is_live(self, now_s: float) -> bool:
        return self.renewed_s is not None and now_s - self.renewed_s <= LEASE_S


def standing(entries: Iterable[Entry]) -> Standing | None:
    """What a listing of a root says; None where no generation was ever claimed. Pure."""
    found = [(int(match[1]), match[2], entry) for entry in entries if (match := RECORD.fullmatch(entry.key))]
    newest = max((number for number, kind, _ in found if kind == "json"), default=None)
    if newest is None:
        return None
    renewed = (entry for number, kind, entry in found if (number, kind) == (newest, "lease"))
    return Standing(newest, max((entry.modified.timestamp() for entry in renewed), default=None))


def generation_of(attempt: str) -> int | None:
    """The generation that an attempt belongs to; None for one that claimed none, as torch's own saves do. Pure."""
    match = ATTEMPT.fullmatch(attempt)
    return int(match[1]) if match else None


def claim(root: Store, holder: str) -> str:
    """Claim the next generation below `root`; returns the prefix of its attempts' names, which ends in `holder`.

    From then on no older generation begins a commit there. Raises StorageError where `root` cannot be written.
    """
    while True:
        number = _newest(root) + 1
        body = {"holder": holder, "claimed": datetime.now(UTC).isoformat(timespec="seconds")}
        with suppress(AlreadyExists):
            root.put(f"{FOLDER}/{number:08d}.json", json.dumps(body).encode(), create=True)
            if _newest(root) == number:  # else this number was given out before, and its record cleaned up
                break
    with suppress(StorageError):  # whoever fails at tidying leaves it to the next one
        _forget(root, before=number - KEPT + 1)
    return f"g{number:08d}-{holder}"


def refuse_superseded(root: Store, attempt: str) -> None:
    """Raises CheckpointError where a newer generation than the attempt's has been claimed."""
    own = generation_of(attempt)
    if own is not None and (newest := _newest(root)) > own:
        raise CheckpointError(
            f"{root.url} was taken over by generation {newest}; this is generation {own}, which may not write any more",
            number=11,
            remedy="another run has taken over this place: end this one, or give it another main.experiment_name",
        )


@contextmanager
def leased(root: Store, attempt: str, rank: int, every_s: float = RENEW_S) -> Iterator[None]:
    """While rank 0 is in here, its generation is known to have a live writer: no part of any rank is a leftover.

    Where the lease cannot be written, age alone protects them.
    """
    own = generation_of(attempt)
    if own is None or rank:
        yield
        return
    done = threading.Event()

    def renew() -> None:
        with suppress(StorageError):
            root.put(f"{FOLDER}/{own:08d}.lease", b"")

    def keep_renewing() -> None:
        while not done.wait(every_s):
            renew()

    renew()
    thread = threading.Thread(target=keep_renewing, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _newest(root: Store) -> int:
    found = standing(root.list(FOLDER))
    return found.number if found else 0


def _forget(root: Store, before: int) -> None:
    """Remove the records of generations long superseded."""
    keys = [entry.key for entry in root.list(FOLDER)]
    root.delete([key for key in keys if (match := RECORD.fullmatch(key)) and int(match[1]) < before])
