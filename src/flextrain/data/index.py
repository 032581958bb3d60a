"""TokenIndexFile: a finished index, opened in constant time and read through memory maps."""

import hashlib
import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flextrain.data.manifest import ENDS_DTYPE, MANIFEST, Manifest, canonical, read_manifest
from flextrain.data.shards import TokenArray, Tokens
from flextrain.data.tokenizer import Tokenizer
from flextrain.errors import DataError, IndexCorrupt
from flextrain.storage import Store, open_store

HASH_BLOCK_BYTES = 16 << 20
CACHE_DIR = "~/.cache/flextrain/indexes"


class TokenIndexFile:
    """One split of an index: `tokens`, `document_ends`, and the tokenizer that made them.

    `tokens` counts as one array of `num_tokens` ids (`dtype` u16 or u32). An index at a URL is first copied, each
    shard checked against its sha256, into `cache_dir` (default ~/.cache/flextrain/indexes).
    """

    def __init__(
        self, path: str | os.PathLike[str], *, split: str = "train", cache_dir: str | os.PathLike[str] | None = None
    ) -> None:
        """Raises DataError (no index there, no such split), IndexCorrupt (broken, truncated) or StorageError."""
        store = open_store(os.fspath(path))
        self.url, self.split, self._store = store.url, split, store
        self._cache_dir = Path(cache_dir or CACHE_DIR).expanduser()
        self.manifest = _manifest_of(store)
        if split not in self.manifest.splits:
            raise DataError(
                f"{self.url} has no split {split!r}",
                number=19,
                remedy=f"use one of {', '.join(sorted(self.manifest.splits))}",
            )
        self.stats = self.manifest.splits[split]
        self._check_sizes(split)
        self._folder = store.local_root or self._download()
        self.tokens = TokenArray([self._map(shard.tokens_key, self.dtype) for shard in self.stats.shards])

    def __repr__(self) -> str:
        return f"TokenIndexFile({self.url!r}, split={self.split!r}, num_tokens={self.num_tokens})"

    def __len__(self) -> int:
        return self.num_tokens

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (self.url, self.split, str(self._cache_dir))

    @property
    def digest(self) -> str:
        """sha256 that stands for the whole index, all splits and the tokenizer included."""
        return self.manifest.digest

    @property
    def num_tokens(self) -> int:
        return self.stats.tokens

    @property
    def num_documents(self) -> int:
        return self.stats.documents

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of the split's text, which bits per byte are counted over."""
        return self.stats.text_bytes

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.manifest.token_dtype

    @property
    def vocab_size(self) -> int:
        return self.manifest.vocab_size

    @cached_property
    def document_ends(self) -> npt.NDArray[np.uint64]:
        """Position after each document's end of text, ascending; the last is `num_tokens`."""
        ends = [self._map(shard.ends_key, ENDS_DTYPE) for shard in self.stats.shards if shard.documents]
        return ends[0] if len(ends) == 1 else np.concatenate(ends)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that encoded the text."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_json(canonical(self.manifest.tokenizer).decode())

    def window(self, start: int, length: int) -> Tokens:
        """Tokens [start, start + length) in the index's dtype. Raises IndexError outside of it."""
        return self.tokens.window(start, length)

    def gather(self, starts: npt.ArrayLike, length: int) -> npt.NDArray[np.int64]:
        """Windows of `length` tokens at `starts`; int64, shape (len(starts), length). Raises IndexError."""
        return self.tokens.gather(starts, length)

    def other(self, split: str) -> "TokenIndexFile":
        """The same index, another split."""
        return TokenIndexFile(self.url, split=split, cache_dir=self._cache_dir)

    def verify(self) -> None:
        """Read every file of every split at its origin; raises IndexCorrupt naming the first that is not as built."""
        for split in self.manifest.splits:
            self._check_sizes(split)
            for key, size_bytes, sha256 in self.manifest.files(split):
                blocks = (
                    self._store.get_range(key, start, min(HASH_BLOCK_BYTES, size_bytes - start))
                    for start in range(0, size_bytes, HASH_BLOCK_BYTES)
                )
                _check_sha256(self._store.url_of(key), blocks, sha256)

    def _check_sizes(self, split: str) -> None:
        sizes = {entry.key: entry.size_bytes for entry in self._store.list()}
        for key, size_bytes, _ in self.manifest.files(split):
            if sizes.get(key) != size_bytes:
                found = f"has {sizes[key]} bytes" if key in sizes else "is missing"
                raise IndexCorrupt(
                    f"{self._store.url_of(key)} {found}; its manifest records {size_bytes} bytes",
                    number=16,
                    remedy="restore the file, or delete the index and build it again",
                )

    def _download(self) -> Path:
        folder = self._cache_dir / self.digest[:16]
        for key, size_bytes, sha256 in self.manifest.files(self.split):
            path = folder / key
            if not (path.exists() and path.stat().st_size == size_bytes):
                fresh = folder / f".{key}.{os.getpid()}.unchecked"
                try:
                    self._store.download(key, fresh)
                    _check_sha256(self._store.url_of(key), _blocks(fresh), sha256)
                    fresh.replace(path)
                finally:
                    fresh.unlink(missing_ok=True)
        return folder

    def _map(self, key: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        try:
            return np.memmap(self._folder / key, dtype=dtype, mode="r").view(np.ndarray)
        except (OSError, ValueError) as error:
            raise IndexCorrupt(
                f"{self._folder / key} cannot be mapped: {error}",
                number=16,
                remedy="check its permissions, restore the file, or build the index again",
            ) from error


def _open(url: str, split: str, cache_dir: str) -> TokenIndexFile:
    return TokenIndexFile(url, split=split, cache_dir=cache_dir)


def _manifest_of(store: Store) -> Manifest:
    manifest = read_manifest(store)
    if manifest is None:
        raise DataError(
            f"{store.url} holds no finished index: there is no {MANIFEST}",
            number=13,
            remedy="build one: flextrain index -o FOLDER; or correct the path",
        )
    return manifest


def _blocks(path: Path) -> Iterable[bytes]:
    with path.open("rb") as file:
        while block := file.read(HASH_BLOCK_BYTES):
            yield block


def _check_sha256(place: str, blocks: Iterable[bytes | memoryview], expected: str) -> None:
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
    found = digest.hexdigest()
    if found != expected:
        raise IndexCorrupt(
            f"{place} was changed: sha256 {found[:16]}…, its manifest records {expected[:16]}…",
            number=17,
            remedy="restore the file, or delete the index and build it again",
        )
