"""What the machine itself can do: copying in memory, and the disk past the page cache.

All of it through private memory in huge pages, since scattered pages more than halve a disk's rate: a limit that ours
has to come near must not be handicapped.
"""

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flextrain.checkpoint.arena import BLOCK_BYTES, huge_buffer, padded

THREADS = 8
CHUNK_BYTES = 16 << 20


def filled(size_bytes: int) -> memoryview:
    """Memory in whole blocks with every page touched, holding bytes that no disk would leave out."""
    buffer = huge_buffer(padded(size_bytes, BLOCK_BYTES))
    noise = os.urandom(1 << 20)
    for start in range(0, len(buffer), len(noise)):
        part = buffer[start : start + len(noise)]
        part[:] = noise[: len(part)]
    return buffer


def memcpy(into: memoryview, source: memoryview) -> None:
    """One thread, as fast as the C library can."""
    address = [ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in (into, source)]
    ctypes.memmove(address[0], address[1], min(len(into), len(source)))


def write_direct(path: Path, data: memoryview) -> None:
    """All of `data` (whole blocks) into a file, past the page cache, and flushed; over what the file holds."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o644)
    os.posix_fallocate(fd, 0, len(data))
    _in_chunks(len(data), lambda low, high: os.pwrite(fd, data[low:high], low))
    os.fsync(fd)
    os.close(fd)


def read_direct(path: Path, into: memoryview) -> None:
    _read(path, into, os.O_RDONLY | os.O_DIRECT)


def read_cached(path: Path, into: memoryview) -> None:
    _read(path, into, os.O_RDONLY)


def _read(path: Path, into: memoryview, flags: int) -> None:
    fd = os.open(path, flags)
    _in_chunks(len(into), lambda low, high: os.preadv(fd, [into[low:high]], low))
    os.close(fd)


def _in_chunks(size_bytes: int, move: Callable[[int, int], int]) -> None:
    def whole(low: int) -> None:
        high = min(low + CHUNK_BYTES, size_bytes)
        moved = move(low, high)
        if moved != high - low:
            raise OSError(f"moved {moved} of {high - low} bytes")

    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(whole, range(0, size_bytes, CHUNK_BYTES)):
            pass


def drop_cache(folder: Path) -> None:
    """Flush every file below and ask the kernel to forget its pages."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def fill_cache(folder: Path) -> None:
    """Read every file below into the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(CHUNK_BYTES):
                    pass


def status_bytes(key: str, pid: int | str = "self") -> int:
    """A figure of /proc/PID/status, such as VmHWM, the peak of VmRSS = RssAnon + RssFile + RssShmem."""
    text = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(f"{key}:"))


def reset_peak() -> None:
    """Let VmHWM begin anew at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
