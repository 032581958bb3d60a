"""One object of a checkpoint where it lies: a file of a folder, or an object of a store. Chunks come out verified.

Nothing outside the step's folder is ever read: no part of an object's name may be a symbolic link there.
"""

import ctypes
import errno
import mmap
import os
import stat
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from itertools import cycle
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from flextrain.checkpoint.arena import BLOCK_BYTES, huge_buffer, padded
from flextrain.checkpoint.manifest import CHUNK_BYTES, ObjectEntry
from flextrain.errors import CheckpointCorrupt, FlextrainError, StorageError
from flextrain.storage import Store

DISK_THREADS = 8  # they do nothing but read, so that the disk is never left waiting; more of them are slower
PIECE_BYTES = 4 << 20  # read at once from a disk
AHEAD = 2  # pieces of a chunk that are being read or used at a time
CACHED_PIECE_BYTES = 1 << 20  # read at once from the page cache: stays in the core's own, where it is hashed and copied
LOST = {errno.ENOENT, errno.EIO, errno.ENOTDIR, errno.ENXIO}  # where memory, descriptors or rights lack, it is not lost
Bytes = NDArray[np.uint8]
Use = Callable[[int, Bytes], None]
Room = Callable[[int, int], Bytes | None]
Pieces = Generator[tuple[int, Bytes], None, None]


def no_room(low: int, high: int) -> None:
    """For whoever has no memory of his own for the bytes from `low` to `high`: they come in a buffer."""


def source_of(folder: Store, name: str, entry: ObjectEntry) -> "Source":
    """The object `name` of a step's folder, wherever that is. Nothing is opened yet."""
    return InFile(folder, name, entry) if folder.local_root else InStore(folder, name, entry)


class Source(ABC):
    """An object in one place. Threads may ask for chunks at the same time.

    Whatever goes wrong is CheckpointCorrupt where bytes are lost, and StorageError where the place ails. `lost` is the
    error that holds for every chunk of the object, once there is one.
    """

    threads = 8  # that ask at the same time, where this is the nearest place

    def __init__(self, folder: Store, name: str, entry: ObjectEntry) -> None:
        self.folder, self.name, self.entry = folder, name, entry
        self.lost: FlextrainError | None = None

    def chunk(self, index: int, use: Use, room: Room = no_room) -> None:
        """Give every piece of a chunk and the byte it begins at to `use`, before the chunk is verified.

        A piece may be read straight into the memory that `room` gives for it, which saves copying it there.
        """
        if self.lost:
            raise self.lost
        start = index * CHUNK_BYTES
        stop = min(start + CHUNK_BYTES, self.entry.size_bytes)
        digest = xxhash.xxh3_64()
        with closing(self.pieces(start, stop, room)) as pieces:
            for low, piece in pieces:
                digest.update(piece.data)
                use(low, piece)
        if digest.hexdigest() != self.entry.chunks[index]:
            raise self.corrupt(f"differs from its hash between bytes {start} and {stop}")

    @abstractmethod
    def pieces(self, start: int, stop: int, room: Room) -> Pieces:
        """The bytes from `start` to `stop`, fewer where the object ends before: pieces in order, and where each begins.
        One is valid until the next is asked for."""

    @abstractmethod
    def open(self, *, cached: bool) -> None:
        """Once, before the first chunk. Where `cached` is false, the page cache is left out."""

    @abstractmethod
    def close(self) -> None:
        """After the last chunk."""

    def corrupt(self, what: str) -> CheckpointCorrupt:
        url = self.folder.url_of(self.name)
        return CheckpointCorrupt(f"{url} {what}", number=6, remedy="an older checkpoint is used where there is one")


class InStore(Source):
    """An object of a remote store, read range by range: each is a request, and nothing is held open."""

    threads = 16  # a connection each: a server gives one no more than some 80 MB/s, or the next while one is hashed

    def open(self, *, cached: bool) -> None:
        pass

    def close(self) -> None:
        pass

    def pieces(self, start: int, stop: int, room: Room) -> Pieces:
        try:
            for piece in self.folder.stream_range(self.name, start, stop - start):
                yield start, np.frombuffer(piece, np.uint8)
                start += len(piece)
        except StorageError as error:
            if self.folder.size(self.name) == self.entry.size_bytes:
                raise  # the store ails, not the object
            self.lost = self.corrupt(f"cannot be read at byte {start} ({error.text})")
            raise self.lost from error


class InFile(Source):
    """An object of a local folder, read past the page cache where that does not hold it."""

    def __init__(self, folder: Store, name: str, entry: ObjectEntry) -> None:
        super().__init__(folder, name, entry)
        self._own = threading.local()
        self._files = ExitStack()

    def open(self, *, cached: bool) -> None:
        assert self.folder.local_root
        try:
            self._direct = open_below(self.folder.local_root, self.name, os.O_DIRECT)
            self._files.callback(os.close, self._direct)
            self._through_cache = open_below(self.folder.local_root, self.name)
            self._files.callback(os.close, self._through_cache)
        except OSError as error:
            self.lost = self._unreadable(error)
            raise self.lost from error
        self._disk = self._files.enter_context(ThreadPoolExecutor(DISK_THREADS))
        found = os.fstat(self._through_cache)
        if not stat.S_ISREG(found.st_mode) or found.st_size != self.entry.size_bytes:
            what = f"has {found.st_size} bytes" if stat.S_ISREG(found.st_mode) else "is no file"
            self.lost = self.corrupt(f"{what}, expected {self.entry.size_bytes} bytes")
            raise self.lost
        self._resident = _pages_in_memory(self._through_cache) if cached else np.zeros(1, np.bool_)

    def close(self) -> None:
        self._files.close()

    def pieces(self, start: int, stop: int, room: Room) -> Pieces:
        if not hasattr(self._own, "buffers"):
            self._own.buffers = [huge_buffer(PIECE_BYTES) for _ in range(AHEAD)]
        pages = self._resident[start // mmap.PAGESIZE : padded(stop, mmap.PAGESIZE) // mmap.PAGESIZE]
        try:
            yield from (
                self._from_cache(start, stop, room) if len(pages) and pages.all() else self._from_disk(start, stop)
            )
        except OSError as error:
            raise self._unreadable(error) from error

    def _from_cache(self, start: int, stop: int, room: Room) -> Pieces:
        for low in range(start, stop, CACHED_PIECE_BYTES):
            length = min(CACHED_PIECE_BYTES, stop - low)
            own = room(low, low + length) if length % BLOCK_BYTES == 0 else None
            yield low, _read(self._through_cache, low, length, self._own.buffers[0] if own is None else own.data)

    def _from_disk(self, start: int, stop: int) -> Pieces:
        """Other threads read the next piece while this one's is used."""
        ahead: deque[tuple[int, Future[Bytes]]] = deque()
        try:
            for low, buffer in zip(range(start, stop, PIECE_BYTES), cycle(self._own.buffers), strict=False):
                length = min(PIECE_BYTES, stop - low)
                ahead.append((low, self._disk.submit(_read, self._direct, low, length, buffer)))
                if len(ahead) == AHEAD:
                    first, read = ahead.popleft()
                    yield first, read.result()
            for first, read in ahead:
                yield first, read.result()
        finally:
            wait([read for _, read in ahead])  # where one failed, the buffers are still being filled

    def _unreadable(self, error: OSError) -> CheckpointCorrupt | StorageError:
        """A file that is gone, no file, or on a bad block is lost; where memory, descriptors or rights lack, not."""
        if error.errno == errno.ELOOP:
            return self.corrupt("cannot be read (it is, or lies behind, a symbolic link)")
        if error.errno in LOST:
            return self.corrupt(f"cannot be read ({error.strerror})")
        url = self.folder.url_of(self.name)
        return StorageError(f"{url}: {error.strerror}", number=4, remedy="check the path and the permissions")


def _read(fd: int, start: int, length: int, buffer: memoryview) -> Bytes:
    """Bytes of a file in `buffer`, fewer where it ends."""
    view, done = buffer[: padded(length, BLOCK_BYTES)], 0
    while done < length and (count := os.preadv(fd, [view[done:]], start + done)):
        done += count
    return np.frombuffer(view, np.uint8)[: min(done, length)]


def open_below(root: Path, name: str, flags: int = 0) -> int:
    """Open a file below `root` for reading. Raises OSError, with ELOOP where a part of `name` is a symbolic link:
    it could lead elsewhere. With O_DIRECT, file systems that have none open it as any other."""
    *folders, file = name.split("/")
    with ExitStack() as passed:
        above = os.open(root, os.O_PATH | os.O_DIRECTORY)
        passed.callback(os.close, above)
        for folder in folders:
            above = os.open(folder, os.O_PATH | os.O_NOFOLLOW, dir_fd=above)
            passed.callback(os.close, above)
            if stat.S_ISLNK(os.fstat(above).st_mode):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        plain = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe under that name must not make us wait
        try:
            return os.open(file, plain | flags, dir_fd=above)
        except OSError as error:
            if error.errno != errno.EINVAL:  # what file systems without O_DIRECT answer
                raise
            return os.open(file, plain, dir_fd=above)


def _pages_in_memory(fd: int) -> NDArray[np.bool_]:
    """For every page of a file whether the page cache holds it. None where the system does not tell.

    Reading with RWF_NOWAIT would not do: it has the kernel fetch what it then says is not there.
    """
    size_bytes = os.fstat(fd).st_size
    pages = np.zeros(padded(size_bytes, mmap.PAGESIZE) // mmap.PAGESIZE, np.uint8)
    if size_bytes:
        mapped = np.frombuffer(mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ), np.uint8)
        addresses = [ctypes.c_void_p(array.ctypes.data) for array in (mapped, pages)]
        ctypes.CDLL(None).mincore(addresses[0], ctypes.c_size_t(size_bytes), addresses[1])
    return (pages & 1).astype(np.bool_)
