"""The chunks of one object, each from the nearest of several places that has it sound, put where they belong."""

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from flextrain.checkpoint.manifest import CHUNK_BYTES, ObjectEntry
from flextrain.checkpoint.sources import Bytes, Room, Source, Use, no_room, source_of
from flextrain.errors import FlextrainError, StorageError
from flextrain.log import get_logger
from flextrain.storage import Store

Places = Store | Sequence[Store]

log = get_logger(__name__)


def in_order(places: Places) -> list[Store]:
    """Folders of one step, nearest first."""
    return [places] if isinstance(places, Store) else list(places)


class Target:
    """Where bytes of an object go, from its byte `start` on: straight into a tensor's memory, or to `finish`, which is
    given all of them when the last chunk that has some is verified."""

    def __init__(
        self,
        start: int,
        size_bytes: int,
        into: Bytes | None = None,
        finish: Callable[[Bytes], object] = lambda whole: None,
    ) -> None:
        """`into` is `size_bytes` long; without it, memory is taken when the first bytes arrive."""
        self.start, self.size_bytes, self._into, self._finish = start, size_bytes, into, finish
        self.chunks = range(start // CHUNK_BYTES, (start + size_bytes - 1) // CHUNK_BYTES + 1)
        self._left = len(self.chunks)
        self._lock = threading.Lock()

    def place(self, begin: int, piece: Bytes) -> None:
        """Copy what belongs here of a piece that begins at byte `begin` of the object."""
        low, high = max(begin, self.start), min(begin + len(piece), self.start + self.size_bytes)
        if low >= high:
            return
        with self._lock:
            if self._into is None:
                self._into = np.empty(self.size_bytes, np.uint8)
        here, there = self._into[low - self.start : high - self.start], piece[low - begin : high - begin]
        if not np.may_share_memory(here, there):  # else it was read into its place
            np.copyto(here, there)

    def room(self, low: int, high: int) -> Bytes | None:
        """The memory of the bytes from `low` to `high`, where that is here already."""
        if self._into is None or low < self.start or high > self.start + self.size_bytes:
            return None
        return self._into[low - self.start : high - self.start]

    def verified(self) -> None:
        """Another of its chunks is in place and sound."""
        with self._lock:
            self._left -= 1
        if not self._left and self._into is not None:
            self._finish(self._into)
            self._into = None


class Parts:
    """The targets of one object, by the index of the chunks that hold their bytes."""

    def __init__(self, targets: Iterable[Target]) -> None:
        found: dict[int, list[Target]] = defaultdict(list)
        for target in targets:
            for index in target.chunks:
                found[index].append(target)
        self._found = dict(sorted(found.items()))

    def __iter__(self) -> Iterator[int]:
        return iter(self._found)

    def __contains__(self, index: int) -> bool:
        return index in self._found

    def place(self, begin: int, piece: Bytes) -> None:
        """Copy a piece of a chunk to where it belongs."""
        for target in self._found[begin // CHUNK_BYTES]:
            target.place(begin, piece)

    def room(self, low: int, high: int) -> Bytes | None:
        """The memory of a piece of a chunk, where all of it goes to one target."""
        targets = self._found[low // CHUNK_BYTES]
        return next((room for target in targets if (room := target.room(low, high)) is not None), None)

    def verified(self, index: int) -> None:
        """Let targets go that waited for this chunk alone."""
        for target in self._found.pop(index):
            target.verified()


class Chunks:
    """The chunks of one object, fetched and verified by as many threads as suit its nearest place. A context: it holds
    files open."""

    def __init__(self, places: Places, name: str, entry: ObjectEntry, *, cached: bool = True) -> None:
        """Where `cached` is false, files are read from the disk itself."""
        self._entry, self._cached = entry, cached
        *nearer, last = in_order(places)
        self._sources = [source_of(folder, name, entry) for folder in [*filter(partial(_may_have, name), nearer), last]]
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

    def scatter(self, parts: Parts, indexes: Iterable[int]) -> None:
        """Fill the targets of the chunks named. Where it raises, they hold anything."""

        def fill(index: int) -> None:
            self.fetch(index, parts.place, parts.room)
            parts.verified(index)

        self._run(indexes, fill)

    def fetch(self, index: int, use: Use, room: Room = no_room) -> None:
        """Give the pieces of a chunk to `use`, from place after place until one had it sound: all but the last time
        they may be wrong. Raises StorageError where a place ails that may have it, else CheckpointCorrupt."""
        errors: list[FlextrainError] = []
        for source in self._sources:
            try:
                self._open(source)
                return source.chunk(index, use, room)
            except FlextrainError as error:
                errors.append(error)
                self._tell(source, error)
        raise next((error for error in errors if isinstance(error, StorageError)), errors[-1])

    def _run(self, indexes: Iterable[int], fetch: Callable[[int], None]) -> None:
        with ThreadPoolExecutor(self._sources[0].threads) as pool:
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


def _may_have(name: str, folder: Store) -> bool:
    """A disk that has nothing of an object is no news; one that has it unsound is."""
    return folder.local_root is None or os.path.lexists(folder.local_root / name)
