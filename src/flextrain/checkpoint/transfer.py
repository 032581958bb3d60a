"""From memory to an object of a bucket: parts in parallel straight from there, hashed chunk by chunk on the way.

Nothing is copied: a part is read where it lies when it is sent, and again when it has to be sent once more. The object
appears at its key when every part has arrived, and not at all where one does not.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import xxhash
from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

from flextrain.checkpoint.manifest import CHUNK_BYTES, ObjectEntry
from flextrain.errors import StorageError
from flextrain.storage import Store

PAUSES_S = (5.0, 20.0)  # at most so long before a second and a third try
HOPELESS = (PermissionDeniedError, UnauthenticatedError, FileNotFoundError)  # the last: there is no such bucket
_pause = time.sleep


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
    """Make `memory[:size_bytes]` object `name` of `folder`. The memory must not change before this returns, and `name`
    must be nobody else's.

    Raises StorageError where the store gives no way after retries; nothing is at `name` then, or all of it. Single
    requests are repeated as `storage.connect` says. What that cannot mend, such as a lost answer to a multipart
    upload's completion, or a server overloaded for longer, is met by starting over, twice.
    """
    for pause_s in (*PAUSES_S, None):
        hashes: list[str] = []
        try:
            folder.put_stream(name, _hashed(memory[:size_bytes], hashes, limit), size_bytes)
            break
        except StorageError as error:
            if len(hashes) == -(-size_bytes // CHUNK_BYTES) and _is_there(folder, name, size_bytes):
                break
            if pause_s is None or isinstance(error.__cause__, HOPELESS):
                raise
        _pause(random.uniform(0, pause_s))
    return ObjectEntry(size_bytes, tuple(hashes))


def _is_there(folder: Store, name: str, size_bytes: int) -> bool:
    """Whether the object came about all the same. Its parts had all been taken, or it would not."""
    with suppress(StorageError):
        return folder.size(name) == size_bytes
    return False


def _hashed(memory: memoryview, hashes: list[str], limit: Bandwidth | None) -> Iterator[memoryview]:
    for start in range(0, len(memory), CHUNK_BYTES):
        chunk = memory[start : start + CHUNK_BYTES]
        if limit:
            limit.take(len(chunk))
        hashes.append(xxhash.xxh3_64_hexdigest(chunk))
        yield chunk
