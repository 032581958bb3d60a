"""The commit, without collectives: every rank signs off its part with a record, rank 0 gathers them and commits.

A rank that fails signs off its error instead, and one that never answers strands nobody longer than the timeout.
"""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from flextrain.checkpoint.catalog import MANIFEST, Catalog, check_objects, taken
from flextrain.checkpoint.generation import refuse_superseded
from flextrain.checkpoint.manifest import Manifest
from flextrain.checkpoint.parts import Part, merged
from flextrain.checkpoint.retention import Keep
from flextrain.checkpoint.verdict import error_of, give_up, settle
from flextrain.errors import CheckpointError, FlextrainError, StorageError, unpack
from flextrain.log import get_logger
from flextrain.storage import Store

POLL_S = 0.02
REMOTE_POLL_S = 0.25
GATHER_THREADS = 32
CROWD = 64  # ranks that may ask a store REMOTE_POLL_S apart; more of them ask less often

Result = TypeVar("Result")

log = get_logger(__name__)


@dataclass(frozen=True)
class Attempt:
    """One try at saving one step, by `world_size` ranks together."""

    step: int
    name: str
    world_size: int

    def record(self, rank: int) -> str:
        return f"{self.name}/rank-{rank:05d}.json"

    def data(self, rank: int) -> str:
        return f"{self.name}/rank-{rank:05d}.bin"


def merge(attempt: Attempt, state: dict[str, Any], parts: Sequence[Part]) -> Manifest:
    """One manifest from what every rank wrote. Pure."""
    return merged(attempt.step, attempt.name, attempt.world_size, state, parts)


def sign_off(catalog: Catalog, attempt: Attempt, rank: int, part: Part | FlextrainError) -> None:
    body = json.dumps({"error": part.pack()}).encode() if isinstance(part, FlextrainError) else part.to_json()
    catalog.folder(attempt.step).put(attempt.record(rank), body)


def gather(catalog: Catalog, attempt: Attempt, timeout_s: float) -> list[Part]:
    """Every rank's part, in order; raises the first error signed off, or CheckpointError after `timeout_s` and as soon
    as the place was taken over."""
    folder, records = catalog.folder(attempt.step), [attempt.record(rank) for rank in range(attempt.world_size)]
    found: dict[str, Part] = {}
    deadline = time.monotonic() + timeout_s
    while True:
        refuse_superseded(catalog.store, attempt.name)  # first: what was removed for it looks like a bad disk
        new = sorted({entry.key for entry in folder.list(attempt.name)}.intersection(records) - found.keys())
        for key, part in zip(new, _many(partial(_record, folder), new), strict=True):
            if isinstance(part, FlextrainError):
                raise part
            if part:
                found[key] = part
        if len(found) == attempt.world_size:
            return [found[key] for key in records]
        if time.monotonic() > deadline:
            silent = [rank for rank, key in enumerate(records) if key not in found]
            raise _silent(attempt, f"ranks {silent[:8]} signed off nothing", timeout_s)
        decided(catalog, attempt)  # raises where another attempt has won, whose retention then deletes our records
        _wait(catalog)


def commit(catalog: Catalog, attempt: Attempt, state: dict[str, Any], keep: Keep, timeout_s: float) -> Manifest:
    """Rank 0's half: gather, commit, retire what is too old. Where it fails, all others are told.

    A writer whose generation was superseded commits nothing any more, and deletes nothing. It may be the second life of
    a killed one: what the first one decided, and others have seen, stays decided.
    """
    try:
        manifest = decided(catalog, attempt)
        if manifest is None:
            manifest = merge(attempt, state, gather(catalog, attempt, timeout_s))
            refuse_superseded(catalog.store, attempt.name)
            _settle(catalog, attempt, manifest)
            catalog.commit(manifest)
    except Exception as error:
        told = explained(error, f"rank 0 could not commit step {attempt.step}")
        with suppress(StorageError):  # where even this cannot be written, the others wait for their timeout
            give_up(catalog.folder(attempt.step), attempt.name, told)
        raise told from error
    try:
        refuse_superseded(catalog.store, attempt.name)
        catalog.retire(keep)
    except (FlextrainError, OSError) as error:  # what is committed is committed; the next save tries again
        log.warning("step %d is committed, but older ones could not be deleted: %s", attempt.step, error)
    return manifest


def _settle(catalog: Catalog, attempt: Attempt, manifest: Manifest) -> None:
    """See that no part was removed nor will be. Raises CheckpointError, which says why the attempt came to nothing."""
    folder = catalog.folder(attempt.step)
    try:
        settle(folder, attempt.name)
        check_objects(folder, manifest)
    except CheckpointError:
        refuse_superseded(catalog.store, attempt.name)
        decided(catalog, attempt)
        raise


def decided(catalog: Catalog, attempt: Attempt) -> Manifest | None:
    """What rank 0 made of an attempt: its manifest, None as long as that is open; raises what made rank 0 give up."""
    folder = catalog.folder(attempt.step)
    if folder.size(MANIFEST) is not None:
        manifest = catalog.manifest(attempt.step)
        if manifest.attempt != attempt.name:
            raise taken(folder)
        return manifest
    if error := error_of(folder, attempt.name):
        raise error
    return None


def signed_off(catalog: Catalog, attempt: Attempt, rank: int) -> Part | FlextrainError | None:
    """What an earlier life of a rank's writer signed off, which is final: rank 0 may have acted on it."""
    return _record(catalog.folder(attempt.step), attempt.record(rank))


def _record(folder: Store, key: str) -> Part | FlextrainError | None:
    text = _get(folder, key)
    if text is None:
        return None
    return unpack(json.loads(text)["error"]) if text.startswith(b'{"error"') else Part.from_json(text)


def _many(action: Callable[[str], Result], keys: Sequence[str]) -> list[Result]:
    """The results of `action`, which mostly waits for a store, in the order of `keys`."""
    if len(keys) <= 1:
        return [action(key) for key in keys]
    with ThreadPoolExecutor(min(len(keys), GATHER_THREADS)) as pool:
        return list(pool.map(action, keys))


def explained(error: Exception, what: str) -> FlextrainError:
    """An error in the form in which all ranks can hear of it."""
    if isinstance(error, FlextrainError):
        return error
    reason = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return CheckpointError(
        f"{what}: {reason}",
        number=7,
        remedy="free space or mend the disk; what was committed before is unharmed",
    )


def _get(folder: Store, key: str) -> bytes | None:
    try:
        return folder.get(key)
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


def await_commit(catalog: Catalog, attempt: Attempt, timeout_s: float) -> Manifest:
    """The others' half: the manifest once it is there; raises what made rank 0 give up."""
    deadline = time.monotonic() + timeout_s
    while True:
        if manifest := decided(catalog, attempt):
            return manifest
        if time.monotonic() > deadline:
            raise _silent(attempt, "rank 0 neither committed nor gave up", timeout_s)
        _wait(catalog, crowd=attempt.world_size)


def _wait(catalog: Catalog, crowd: int = 1) -> None:
    time.sleep((POLL_S if catalog.store.local_root else REMOTE_POLL_S) * max(1.0, crowd / CROWD))


def _silent(attempt: Attempt, what: str, timeout_s: float) -> CheckpointError:
    return CheckpointError(
        f"step {attempt.step}: {what} within {timeout_s:.0f} s",
        number=9,
        remedy="look at the logs of those ranks; what was committed before is unharmed",
    )
