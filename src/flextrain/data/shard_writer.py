"""Appends the token ids of one split and hands every full shard to the store, hashed on the way."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flextrain.data.manifest import ENDS_DTYPE, Shard, SplitStats, shard_name
from flextrain.storage import Store


class SplitWriter:
    """Memory stays at one document: a shard grows in a scratch file and leaves it when it is full."""

    def __init__(self, store: Store, split: str, dtype: np.dtype[Any], shard_tokens: int, scratch: Path) -> None:
        self._store, self._split, self._dtype, self._shard_tokens = store, split, dtype, shard_tokens
        self._path = scratch / f"{split}.bin"
        self._file = self._path.open("wb")
        self._hash = hashlib.sha256()
        self._in_shard = self._tokens = self._documents = self._text_bytes = 0
        self._ends: list[int] = []  # of documents that end in the shard being written
        self.shards: list[Shard] = []

    def add(self, ids: npt.NDArray[Any], text_bytes: int) -> None:
        """One document; `ids` ends with the end of text."""
        data = ids.astype(self._dtype)
        self._text_bytes += text_bytes
        self._documents += 1
        while len(data):
            part, data = data[: self._shard_tokens - self._in_shard], data[self._shard_tokens - self._in_shard :]
            self._file.write(part.data)
            self._hash.update(part.data)
            self._in_shard += len(part)
            self._tokens += len(part)
            if not len(data):
                self._ends.append(self._tokens)
            if self._in_shard == self._shard_tokens:
                self._hand_over()

    def finish(self) -> SplitStats:
        """Hand over the last shard; what the manifest says about this split."""
        if self._in_shard:
            self._hand_over()
        self._file.close()
        return SplitStats(
            documents=self._documents,
            tokens=self._tokens,
            text_bytes=self._text_bytes,
            shards=tuple(self.shards),
        )

    def close(self) -> None:
        self._file.close()

    def _hand_over(self) -> None:
        ends = np.array(self._ends, dtype=ENDS_DTYPE).tobytes()
        shard = Shard(
            name=shard_name(self._split, len(self.shards)),
            tokens=self._in_shard,
            documents=len(self._ends),
            tokens_sha256=self._hash.hexdigest(),
            ends_sha256=hashlib.sha256(ends).hexdigest(),
        )
        self.shards.append(shard)
        self._file.close()
        self._store.put(shard.tokens_key, self._path)
        self._store.put(shard.ends_key, ends)
        self._file = self._path.open("wb")
        self._hash, self._in_shard, self._ends = hashlib.sha256(), 0, []
