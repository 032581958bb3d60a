"""Finds checkpoints at or below any URL: one checkpoint, a run, an experiment. Torch-free."""

import re
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime

from flextrain.checkpoint.catalog import EXAMPLE, MANIFEST, STEP_FOLDER
from flextrain.errors import CheckpointError
from flextrain.storage import Entry, open_store

PART = re.compile(r"(?:(?P<folder>.+)/)?[A-Za-z0-9-]+/rank-\d{5,}\.(?:bin|json|part)")


@dataclass(frozen=True)
class Found:
    """A folder that holds a checkpoint or what is left of the attempt at one; `name` is relative to where was searched.

    `modified` is the time of the commit, or of the last write where there was none; `size_bytes` all that lies there.
    """

    url: str
    name: str
    size_bytes: int
    modified: datetime
    committed: bool

    @property
    def step(self) -> int | None:
        """The step that the folder is named after."""
        match = STEP_FOLDER.match(self.url.rpartition("/")[2])
        return int(match[1]) if match else None

    @property
    def root(self) -> str:
        """URL of the folder that the checkpoint lies in, with others of its run."""
        return self.url.rpartition("/")[0]


def survey(url: str) -> list[Found]:
    """Every checkpoint at or below `url`, committed or not, by folder and step."""
    store = open_store(url)
    entries = store.list()
    folders = {_folder_of(entry.key) for entry in entries}
    if STEP_FOLDER.match(store.url.rpartition("/")[2]) and any(entry.key == MANIFEST for entry in entries):
        folders.add("")
    below: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        parents = [entry.key[:place] for place, letter in enumerate(entry.key) if letter == "/"]
        for folder in folders.intersection(["", *parents]):
            below[folder or ""].append(entry)
    return [_found(store.url, folder, below[folder]) for folder in sorted(f for f in folders if f is not None)]


def committed_below(url: str) -> list[Found]:
    """Every committed checkpoint at or below `url`. Raises CheckpointError where there is none."""
    found = [checkpoint for checkpoint in survey(url) if checkpoint.committed]
    if not found:
        raise CheckpointError(f"there is no committed checkpoint at or below {url}", number=4, remedy=EXAMPLE)
    return found


def newest_below(url: str) -> Found:
    """The checkpoint at `url`, or the one committed last below it. Raises CheckpointError where there is none."""
    return max(committed_below(url), key=lambda checkpoint: (checkpoint.modified, checkpoint.url))


def _folder_of(key: str) -> str | None:
    """The checkpoint folder that an object shows to be one."""
    part = PART.fullmatch(key)
    if part:
        return part["folder"] or ""
    folder, _, name = key.rpartition("/")
    return folder if name == MANIFEST and STEP_FOLDER.match(folder.rpartition("/")[2]) else None


def _found(root: str, folder: str, entries: list[Entry]) -> Found:
    manifest = next((entry for entry in entries if entry.key == f"{folder}/{MANIFEST}".lstrip("/")), None)
    return Found(
        url=f"{root}/{folder}" if folder else root,
        name=folder or root.rpartition("/")[2],
        size_bytes=sum(entry.size_bytes for entry in entries),
        modified=manifest.modified if manifest else max(entry.modified for entry in entries),
        committed=manifest is not None,
    )
