"""A node's own fast disk between memory and the store: snapshots land there first, and are uploaded from there.

<nvme>/step-00000050/<attempt>/rank-00000.bin     a rank's part, byte for byte what the store gets under the same name
<nvme>/step-00000050/<attempt>/rank-00000.json    its record, sealed and written last: from then on the part is staged

No rank waits for another here. A step can be resumed from these disks when the records of all its ranks are found, on
whichever nodes they lie. Torch-free.
"""

import json
import mmap
import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flextrain.checkpoint.arena import Layout
from flextrain.checkpoint.catalog import STEP_FOLDER, step_folder
from flextrain.checkpoint.commit import Attempt
from flextrain.checkpoint.manifest import sealed, unsealed
from flextrain.checkpoint.parts import Part, part_of
from flextrain.checkpoint.persist import SPARES, flush, keep_spare, persist
from flextrain.errors import CheckpointCorrupt, CheckpointError
from flextrain.log import get_logger
from flextrain.storage import Store, open_store

KEPT = 2  # staged snapshots of each rank: should a rank die over the newest one, all have the one before

log = get_logger(__name__)


@dataclass(frozen=True)
class Staged:
    """One rank's record: the attempt it is part of, what that saved besides tensors, and where the bytes lie."""

    attempt: Attempt
    rank: int
    state: dict[str, Any]
    part: Part

    def to_json(self) -> bytes:
        head = {"step": self.attempt.step, "attempt": self.attempt.name, "world_size": self.attempt.world_size}
        body = {**head, "rank": self.rank, "state": self.state, **json.loads(self.part.to_json())}
        return sealed(json.dumps(body).encode())

    @classmethod
    def from_json(cls, text: bytes) -> "Staged":
        """Raises ValueError or KeyError for anything but what `to_json` wrote."""
        body = json.loads(unsealed(text))
        attempt = Attempt(body["step"], body["attempt"], body["world_size"])
        return cls(attempt, body["rank"], body["state"], Part.from_dict(body))


class Staging:
    """The folder `url` on a disk of this node. Several ranks of the node share it."""

    def __init__(self, url: str) -> None:
        """Raises CheckpointError for a URL that is no folder of this machine."""
        store = open_store(url)
        if store.local_root is None:
            raise CheckpointError(
                f"checkpoint.nvme_path is {url}, which is no folder of this machine",
                number=41,
                remedy="name a folder on a local disk; checkpoint.storage is for URLs",
            )
        self.store, self._root = store, store.local_root

    def folder(self, step: int) -> Store:
        return self.store.child(step_folder(step))

    def put(self, attempt: Attempt, rank: int, state: dict[str, Any], layout: Layout, memory: memoryview) -> Staged:
        """Make a snapshot durable here, then its record. Raises OSError or StorageError."""
        part, name = Part(), attempt.data(rank)
        if layout.size_bytes:
            entry = persist(self.store, self.folder(attempt.step), name, memory, layout.size_bytes)
            part = part_of(layout, name, entry)
        staged = Staged(attempt, rank, state, part)
        folder, key = self.folder(attempt.step), attempt.record(rank)
        folder.put(key, staged.to_json())
        assert folder.local_root
        path = folder.local_root / key
        for place in (path, path.parent, folder.local_root, self._root):
            flush(place)
        return staged

    def find(self, attempt: Attempt, rank: int) -> Staged | None:
        """What an earlier life of this rank's writer staged."""
        return _read(self._root / step_folder(attempt.step) / attempt.record(rank))

    def found(self) -> list[Staged]:
        """Every sound record here."""
        return [staged for path in self._records() if (staged := _read(path))]

    def open(self, staged: Staged) -> memoryview:
        """The bytes of a part, mapped. Raises CheckpointCorrupt where the file is gone or has another size."""
        ((name, entry),) = staged.part.objects.items()
        path = self._root / step_folder(staged.attempt.step) / name
        try:
            with path.open("rb") as file:
                if (size_bytes := os.fstat(file.fileno()).st_size) != entry.size_bytes:
                    raise OSError(f"it has {size_bytes} bytes, expected {entry.size_bytes}")
                return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        except OSError as error:
            raise spoilt(path, str(error)) from error

    def retire(self, rank: int, busy: Collection[str] = ()) -> None:
        """Remove what `rank` has here, but for the KEPT staged last and the attempts in `busy`, which are being written
        or uploaded. One file is kept to be written over."""
        files = sorted(self._root.glob(f"step-*/*/rank-{rank:05d}.*"), key=_age)
        records = [path for path in files if path.suffix == ".json"]
        kept = {path.parent.name for path in records[-KEPT:]}.union(busy)
        ranks_here = len({path.name for path in self._records()})
        for path in sorted(files, key=lambda path: path.suffix != ".json"):  # data without a record are nothing
            if path.parent.name in kept:
                continue
            if path.suffix != ".bin" or not keep_spare(self._root / SPARES, path, at_most=ranks_here):
                path.unlink(missing_ok=True)
            for folder in (path.parent, path.parent.parent):
                with suppress(OSError):  # the parts of other ranks are in there
                    folder.rmdir()

    def _records(self) -> list[Path]:
        """Records of all ranks and steps."""
        return [path for path in self._root.glob("step-*/*/rank-*.json") if STEP_FOLDER.match(path.parts[-3])]


def spoilt(where: object, reason: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"{where} was staged and cannot be uploaded: {reason}",
        number=42,
        remedy="look at that disk; the next checkpoint does not depend on this one",
    )


def _age(path: Path) -> tuple[int, Path]:
    with suppress(FileNotFoundError):
        return path.stat().st_mtime_ns, path
    return 0, path


def _read(record: Path) -> Staged | None:
    try:
        return Staged.from_json(record.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s is no sound record of a staged snapshot and is passed over: %s", record, error)
        return None
