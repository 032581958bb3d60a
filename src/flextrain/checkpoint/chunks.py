"""The chunks of one object, each from the nearest of several places that has it sound, put where they belong."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from flextrain.checkpoint.manifest import CHUNK_BYTES, ObjectEntry
from flextrain.checkpoint.sources import Bytes, Source, Use, source_of
from flextrain.errors import FlextrainError, StorageError
from flextrain.log import get_logger
from flextrain.storage import Store

THREADS = 8
Places = Store | Sequence[Store]

log = get_logger(__name__)


def in_order(places: Places) -> list[Store]:
    """Folders of one step, nearest first."""
    return [places] if isinstance(places, Store) else list(places)


@dataclass(frozen=True)
class Target:
    """Where bytes [start, start + len(into)) of an object go; `finish` puts them in place if `into` is no tensor."""

    start: int
    into: Bytes
    finish: Callable[[], object]


def by_chunk(targets: Iterable[Target]) -> dict[int, list[Target]]:
    """The targets that bytes of each chunk go to, by the chunk's index."""
    parts: dict[int, list[Target]] = defaultdict(list)
    for target in targets:
        last = (target.start + len(target.into) - 1) // CHUNK_BYTES
        for index in range(target.start // CHUNK_BYTES, last + 1):
            parts[index].append(target)
    return dict(sorted(parts.items()))


def place(targets: Iterable[Target], begin: int, piece: Bytes) -> None:
    """Copy a piece, which begins at byte `begin` of the object, to those of the targets that it reaches."""
    for target in targets:
        low, high = max(begin, target.start), min(begin + len(piece), target.start + len(target.into))
        if low < high:
            np.copyto(target.into[low - target.start : high - target.start], piece[low - begin : high - begin])


class Chunks:
    """The chunks of one object, fetched and verified by THREADS threads. A context: it holds files open."""

    def __init__(self, places: Places, name: str, entry: ObjectEntry, *, cached: bool = True) -> None:
        """Where `cached` is false, files are read from the disk itself."""
        self._entry, self._cached = entry, cached
        self._sources = [source_of(folder, name, entry) for folder in in_order(places)]
        self._opened: list[Source] = []
        self._told: set[Source] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> "Chunks":
        return self

    def __exit__(self, *error: object) -> None:
        for source in self._opened:
            source.close()

    def check(self) -> None:
        """Raises CheckpointCorrupt for the first chunk that differs."""
        self._run(range(len(self._entry.chunks)), lambda index: self.fetch(index, lambda begin, piece: None))

    def scatter(self, parts: dict[int, list[Target]]) -> None:
        """Fill the targets of the chunks named. Where it raises, they hold anything."""
        self._run(parts, lambda index: self.fetch(index, lambda begin, piece: place(parts[index], begin, piece)))

    def fetch(self, index: int, use: Use) -> None:
        """Give the pieces of a chunk to `use`, from place after place until one had it sound: all but the last time
        they may be wrong. Raises StorageError where a place ails that may have it, else CheckpointCorrupt."""
        errors: list[FlextrainError] = []
        for source in self._sources:
            try:
                self._open(source)
                return source.chunk(index, use)
            except FlextrainError as error:
                errors.append(error)
                self._tell(source, error)
        raise next((error for error in errors if isinstance(error, StorageError)), errors[-1])

    def _run(self, indexes: Iterable[int], fetch: Callable[[int], None]) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(fetch, indexes):
                pass

    def _open(self, source: Source) -> None:
        with self._lock:
            if source not in self._opened:
                self._opened.append(source)
                source.open(cached=self._cached)

    def _tell(self, source: Source, error: FlextrainError) -> None:
        with self._lock:
            if source not in self._told and source is not self._sources[-1]:
                log.warning("%s; the next place is tried", error.text)
            self._told.add(source)
