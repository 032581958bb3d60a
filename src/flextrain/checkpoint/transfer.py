"""From memory to an object of a bucket: parts in parallel straight from there, hashed chunk by chunk on the way.

Nothing is copied: a part is read where it lies when it is sent, and again when it has to be sent once more. The object
appears at its key when every part has arrived, and not at all where one does not.
"""

import threading
import time
from collections.abc import Callable, Iterator

import xxhash

from flextrain.checkpoint.arena import padded
from flextrain.checkpoint.manifest import CHUNK_BYTES, ObjectEntry
from flextrain.storage import Store
from flextrain.storage.store import PART_BYTES

MAX_PARTS = 10_000  # of one object, on S3 and on Google's


class Bandwidth:
    """At most `bytes_per_s` on average, for all threads that share it."""

    def __init__(
        self,
        bytes_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s, self._clock, self._sleep = bytes_per_s, clock, sleep
        self._free_at_s = 0.0
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> None:
        """Wait until `size_bytes` may be sent; they begin when all that was taken before is through."""
        with self._lock:
            now_s = self._clock()
            begin_s = max(now_s, self._free_at_s)
            self._free_at_s = begin_s + size_bytes / self._bytes_per_s
        if begin_s > now_s:
            self._sleep(begin_s - now_s)


def upload(
    folder: Store, name: str, memory: memoryview, size_bytes: int, *, limit: Bandwidth | None = None
) -> ObjectEntry:
    """Make `memory[:size_bytes]` object `name` of `folder`. The memory must not change before this returns.

    Raises StorageError where the store gives no way after retries (see `storage.store`); nothing is at `name` then.
    """
    hashes: list[str] = []
    part_bytes = max(PART_BYTES, padded(-(-size_bytes // MAX_PARTS), 1 << 20))
    folder.put_stream(name, _hashed(memory[:size_bytes], hashes, limit), part_bytes)
    return ObjectEntry(size_bytes, tuple(hashes))


def _hashed(memory: memoryview, hashes: list[str], limit: Bandwidth | None) -> Iterator[memoryview]:
    for start in range(0, len(memory), CHUNK_BYTES):
        chunk = memory[start : start + CHUNK_BYTES]
        if limit:
            limit.take(len(chunk))
        hashes.append(xxhash.xxh3_64_hexdigest(chunk))
        yield chunk
