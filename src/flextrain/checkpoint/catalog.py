"""The checkpoints below one root: listing, committing, retiring, finding the newest. Torch-free."""

import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from flextrain.checkpoint.chunks import Places, in_order
from flextrain.checkpoint.generation import standing
from flextrain.checkpoint.manifest import Manifest
from flextrain.checkpoint.persist import SPARES, flush, keep_spare
from flextrain.checkpoint.retention import ORPHAN_AGE_S, Keep, numbers, orphaned_attempts, steps_to_delete
from flextrain.checkpoint.verdict import condemn, verdict_key
from flextrain.errors import AlreadyExists, CheckpointCorrupt, CheckpointError, FlextrainError, StorageError
from flextrain.storage import Entry, Store, open_store

MANIFEST = "manifest.json"
SET_ASIDE = "manifest.unsound.json"
EXAMPLE = "name a folder like …/checkpoints/step-00000100 that contains manifest.json"
STEP_FOLDER = re.compile(r"^step-(\d{8,})$")
_known_numbers: dict[tuple[str, float], dict[str, float]] = {}  # (manifest's URL, time) -> the numbers in its state


def step_folder(step: int) -> str:
    return f"step-{step:08d}"


@dataclass(frozen=True)
class Doomed:
    """What is to go: committed steps, oldest first, and (step, attempt) of leftovers that nobody is still writing."""

    steps: list[int]
    attempts: list[tuple[int, str]]


class Catalog:
    """Committed checkpoints below `store`, one folder per step."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @classmethod
    def locate(cls, url: str) -> tuple["Catalog", int]:
        """The catalog and step of a checkpoint URL; raises CheckpointError where it is none."""
        root, _, folder = url.rstrip("/").rpartition("/")
        match = STEP_FOLDER.match(folder)
        if not match:
            raise CheckpointError(f"{url} is not a checkpoint", number=4, remedy=EXAMPLE)
        return cls(open_store(root)), int(match[1])

    def steps(self) -> list[int]:
        """Committed steps, oldest first."""
        return sorted(step for step, parts, _ in _objects(self.store.list()) if parts == [MANIFEST])

    def url_of(self, step: int) -> str:
        return self.store.url_of(step_folder(step))

    def folder(self, step: int) -> Store:
        return self.store.child(step_folder(step))

    def manifest(self, step: int) -> Manifest:
        """Raises CheckpointCorrupt for an unsound manifest, StorageError where there is none."""
        manifest = read_manifest(self.folder(step))
        if manifest.step != step:
            raise CheckpointCorrupt(
                f"{self.folder(step).url_of(MANIFEST)} is that of step {manifest.step}",
                number=1,
                remedy="an older checkpoint is used where there is one",
            )
        return manifest

    def check(self, step: int) -> Manifest:
        """The manifest, once every object it names is there in full size. Contents are verified when they are read."""
        manifest = self.manifest(step)
        check_objects(self.folder(step), manifest)
        return manifest

    def commit(self, manifest: Manifest) -> str:
        """Create the manifest if there is none; returns its URL. Raises CheckpointError where the step is taken."""
        create_manifest(self.folder(manifest.step), manifest)
        return self.url_of(manifest.step)

    def retire(self, keep: Keep) -> list[int]:
        """Delete checkpoints that `keep` does not speak for, and leftovers of dead attempts; returns the steps.

        Raises CheckpointError, and deletes nothing, where the best are to be kept by a metric that none has.
        """
        doomed = self.doomed(keep)
        self.remove(doomed)
        return doomed.steps

    def doomed(self, keep: Keep | None) -> Doomed:
        """What `retire` would delete; None keeps every committed checkpoint."""
        entries = self.store.list()
        objects = list(_objects(entries))
        committed = {step: written_s for step, parts, written_s in objects if parts == [MANIFEST]}
        steps = steps_to_delete(self._metrics(committed, keep), keep) if keep else []
        last_write: dict[tuple[int, str], float] = {}
        for step, parts, written_s in objects:
            if len(parts) == 2 and step not in steps:
                last_write[step, parts[0]] = max(written_s, last_write.get((step, parts[0]), 0.0))
        contested = {
            step
            for step, attempt in last_write
            if step in committed and len([s for s, _ in last_write if s == step]) > 1
        }
        owners = {
            step: self._owner(step) if step in contested else attempt
            for step, attempt in last_write
            if step in committed
        }
        return Doomed(steps, orphaned_attempts(last_write, owners, time.time(), standing(entries)))

    def numbers(self, step: int, committed_s: float) -> dict[str, float]:
        """The numbers in the state of a checkpoint committed at `committed_s`: read once, as a manifest may be large.

        None of an unsound manifest, or one retired meanwhile; raises StorageError where it cannot be read.
        """
        key = (self.url_of(step), committed_s)
        if key not in _known_numbers:
            try:
                _known_numbers[key] = numbers(self.manifest(step).state)
            except CheckpointError:
                _known_numbers[key] = {}
        return _known_numbers[key]

    def _metrics(self, committed: Mapping[int, float], keep: Keep) -> dict[int, float | None]:
        if not keep.best_n:
            return dict.fromkeys(committed)
        known = {step: self.numbers(step, committed_s) for step, committed_s in committed.items()}
        if known and not any(keep.metric in found for found in known.values()):
            keep.check({name: value for found in known.values() for name, value in found.items()})  # raises
        return {step: found.get(keep.metric) for step, found in known.items()}

    def remove(self, doomed: Doomed) -> None:
        """The manifest goes first, so that a half-deleted checkpoint is never taken for a committed one."""
        for step in doomed.steps:
            self.delete(step)
        for step, attempt in doomed.attempts:
            self._delete_attempt(step, attempt)

    def delete(self, step: int) -> None:
        """Remove a checkpoint, manifest first. In a folder its files are kept aside for the next one to write over."""
        folder = self.folder(step)
        keys = [entry.key for entry in folder.list() if entry.key != MANIFEST]  # not what is saved there from now on
        folder.delete([MANIFEST])
        data = [key for key in keys if key.endswith(".bin")]
        if self.store.local_root and folder.local_root:
            for key in data:
                keep_spare(self.store.local_root / SPARES, folder.local_root / key, at_most=len(data))
        folder.delete(keys)

    def drop_spares(self) -> None:
        """Free the space of files kept to be written over; a writer that has taken one keeps it."""
        self.store.delete([entry.key for entry in self.store.list(SPARES)])

    def set_aside(self, step: int) -> None:
        """Withdraw a commit found unsound, so that the step can be saved anew. Its manifest stays under another name,
        for a person to look at, and its data until they are orphans."""
        folder = self.folder(step)
        with suppress(StorageError):  # another process retired it, or there is no room for a copy
            folder.put(SET_ASIDE, folder.get(MANIFEST))
        folder.delete([MANIFEST])

    def _owner(self, step: int) -> str | None:
        """The attempt that a committed step's manifest names; None where it is unsound, or was retired meanwhile."""
        try:
            return self.manifest(step).attempt
        except CheckpointError:
            return None

    def _delete_attempt(self, step: int, attempt: str) -> None:
        """Remove an attempt's objects once it is condemned, the verdict last: its writer may wake at any moment."""
        folder = self.folder(step)
        entries = folder.list(attempt)
        written_s = max((entry.modified.timestamp() for entry in entries), default=0.0)
        if condemn(folder, attempt) or time.time() - written_s > ORPHAN_AGE_S:
            folder.delete([entry.key for entry in entries if entry.key != verdict_key(attempt)])
            folder.delete([verdict_key(attempt)])


def _objects(entries: Iterable[Entry]) -> Iterator[tuple[int, list[str], float]]:
    """(step, path below its folder, time of last write) of what lies in folders of steps."""
    for entry in entries:
        head, _, rest = entry.key.partition("/")
        match = STEP_FOLDER.match(head)
        if match and rest:
            yield int(match[1]), rest.split("/"), entry.modified.timestamp()


def read_manifest(folder: Store) -> Manifest:
    """The manifest in a step's folder; CheckpointError where nothing was committed there."""
    _refuse_what_is_no_file(folder)
    try:
        text = folder.get(MANIFEST)
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise CheckpointError(
                f"{folder.url} holds no committed checkpoint",
                number=4,
                remedy=EXAMPLE,
            ) from error
        raise
    return Manifest.from_json(text, folder.url_of(MANIFEST))


def _refuse_what_is_no_file(folder: Store) -> None:
    """A link could lead to any file of this machine, and a pipe would make us wait for ever."""
    path = folder.local_root / MANIFEST if folder.local_root else None
    if path and os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise CheckpointCorrupt(
            f"{path} is no file of its own, but a link, a folder or a pipe",
            number=1,
            remedy="an older checkpoint is used where there is one",
        )


def check_objects(places: Places, manifest: Manifest) -> None:
    """Raises CheckpointCorrupt unless some place has every object that the manifest names, in full size.

    A further place is asked only for what the nearer ones lack. Raises StorageError where one ails that may have it.
    """
    lacking, ailing = dict(manifest.objects), None
    for folder in in_order(places):
        try:
            sizes = {entry.key: entry.size_bytes for entry in folder.list()}
        except StorageError as error:
            ailing = error
            continue
        lacking = {name: entry for name, entry in lacking.items() if sizes.get(name) != entry.size_bytes}
        if not lacking:
            return
    if ailing:
        raise ailing
    name, entry = next(iter(lacking.items()))
    found = "is missing" if name not in sizes else f"has {sizes[name]} bytes"
    raise CheckpointCorrupt(
        f"{folder.url_of(name)} {found}, expected {entry.size_bytes} bytes",
        number=2,
        remedy="an older checkpoint is used where there is one",
    )


def create_manifest(folder: Store, manifest: Manifest) -> None:
    """The commit: create a step's manifest, durably. Raises CheckpointError where there is one of another attempt."""
    try:
        folder.put(MANIFEST, manifest.to_json(), create=True)
    except AlreadyExists as error:
        if _attempt_of(folder) != manifest.attempt:  # else it is our own, and only the answer to it was lost
            raise taken(folder) from error
    except StorageError:
        if _attempt_of(folder) != manifest.attempt:  # else it was created, and the answer was lost
            raise
    if folder.local_root:
        with suppress(FileNotFoundError):  # a run that took over has retired it already, for newer ones
            flush(folder.local_root / MANIFEST)
            flush(folder.local_root)
            flush(folder.local_root.parent)


def taken(folder: Store) -> CheckpointError:
    """What an attempt hears that lost its step to another one."""
    return CheckpointError(
        f"{folder.url} was committed by another attempt",
        number=3,
        remedy="two runs write to one place: give one of them another main.experiment_name",
    )


def _attempt_of(folder: Store) -> str | None:
    """The attempt that a step's manifest names; None where it cannot be read."""
    try:
        return read_manifest(folder).attempt
    except FlextrainError:
        return None


def newest_checkpoint(root_url: str) -> str | None:
    """URL of the newest committed checkpoint anywhere below `root_url` (an experiment: its runs), or None.

    Newest is the last one committed, by the store's clock, so that a later run wins over a longer earlier one.
    """
    store = open_store(root_url)
    manifests = [entry for entry in store.list() if entry.key.endswith(f"/{MANIFEST}") and "/step-" in f"/{entry.key}"]
    if not manifests:
        return None
    newest = max(manifests, key=lambda entry: (entry.modified, entry.key))
    return store.url_of(newest.key.removesuffix(f"/{MANIFEST}"))
