"""One Store over a local folder, S3, GCS and Azure (obstore): whole objects, ranges, create-if-absent as the commit."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, MemoryStore

from flextrain.errors import AlreadyExists, StorageError
from flextrain.storage.connect import connect

REMOTE_SCHEMES = ("s3", "gs", "az", "abfs", "memory")
DOWNLOAD_CHUNK_BYTES = 16 << 20
PART_BYTES, PARTS_AT_ONCE = 32 << 20, 8
MAX_PARTS = 10_000  # of one object, on S3 and on Google's
PIECE_BYTES = 256 << 10  # of a stream: still in the processor's cache when it is used

AZURE = "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY…, or a managed identity"
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID…, a profile or an instance role",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or the machine's account",
    "az": AZURE,
    "abfs": AZURE,
}


@dataclass(frozen=True)
class Entry:
    """One object: key relative to its store, size in bytes, time of last change (UTC)."""

    key: str
    size_bytes: int
    modified: datetime


class Store:
    """Objects below one URL. Keys are relative paths with `/`; an object appears whole or not at all.

    Every method raises StorageError, naming URL and remedy, where the backend fails; `get`, `get_range` and
    `download` raise it with `number=2` where the object does not exist.
    """

    def __init__(self, url: str, backend: Any = None, prefix: str = "", folder: Path | None = None) -> None:
        """`backend` is an obstore store, or None for a local `folder`, which only the first `put` creates."""
        self.url, self._prefix, self._folder = url.rstrip("/"), prefix, folder
        self._remote = backend

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def child(self, prefix: str) -> "Store":
        """The store below `prefix`."""
        return Store(f"{self.url}/{prefix}", self._remote, self._key(prefix), self._folder)

    @property
    def local_root(self) -> Path | None:
        """The folder, where this store is one."""
        return self._folder / self._prefix if self._folder else None

    def url_of(self, key: str) -> str:
        return f"{self.url}/{key}"

    def put(self, key: str, data: bytes | bytearray | memoryview | Path, *, create: bool = False) -> None:
        """Write an object; with `create`, raise AlreadyExists where there is one (exactly one of many writers wins)."""
        with self._explain(key):
            if self._folder:
                self._folder.mkdir(parents=True, exist_ok=True)
            obstore.put(self._backend, self._key(key), data, **({"mode": "create"} if create else {}))

    def put_stream(self, key: str, chunks: Iterator[bytes | memoryview], size_bytes: int | None = None) -> None:
        """Write an object from pieces that are made on the way; nothing appears at `key` where one of them fails.

        They are sent as parts, PARTS_AT_ONCE at a time and without a copy: what is behind them must not change. An
        object of more than MAX_PARTS * PART_BYTES must name its `size_bytes`; a small one that does is sent at once.
        """
        fitting = -(-(size_bytes or 0) // MAX_PARTS)
        with self._explain(key):
            if self._folder:
                self._folder.mkdir(parents=True, exist_ok=True)
            obstore.put(
                self._backend,
                self._key(key),
                chunks,
                use_multipart=size_bytes is None or size_bytes > PART_BYTES,
                chunk_size=max(PART_BYTES, fitting),
                max_concurrency=PARTS_AT_ONCE,
            )

    def get(self, key: str) -> bytes:
        with self._explain(key):
            return bytes(obstore.get(self._backend, self._key(key)).bytes())

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        """`length` bytes from offset `start`; raises StorageError where the object is shorter."""
        with self._explain(key):
            view = memoryview(obstore.get_range(self._backend, self._key(key), start=start, length=length))
        if len(view) != length:
            raise self._truncated(key, start + length)
        return view

    def stream_range(self, key: str, start: int, length: int) -> Iterator[bytes]:
        """The bytes that `get_range` gives, piece by piece as they arrive."""
        left = length
        with self._explain(key):
            result = obstore.get(self._backend, self._key(key), options={"range": (start, start + length)})
            for piece in result.stream(min_chunk_size=PIECE_BYTES):
                left -= len(piece)
                yield piece
        if left:
            raise self._truncated(key, start + length)

    def size(self, key: str) -> int | None:
        """Bytes of an object, or None where it does not exist."""
        entry = self.stat(key)
        return entry.size_bytes if entry else None

    def stat(self, key: str) -> Entry | None:
        """Size and time of an object, or None where it does not exist."""
        try:
            with self._explain(key):
                row = obstore.head(self._backend, self._key(key))
                return Entry(key, row["size"], row["last_modified"])
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    def list(self, prefix: str = "") -> list[Entry]:
        """Every object below `prefix` (whole path segments), sorted by key."""
        if self._folder and not self._folder.is_dir():
            return []
        with self._explain(prefix):
            rows = [row for page in obstore.list(self._backend, self._key(prefix) or None) for row in page]
        start = len(self._prefix) + 1 if self._prefix else 0
        return sorted(
            (Entry(row["path"][start:], row["size"], row["last_modified"]) for row in rows), key=lambda e: e.key
        )

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; those already gone are no error."""
        paths = {self._key(key): key for key in keys}
        try:
            if paths:
                with self._explain(""):
                    obstore.delete(self._backend, list(paths))
        except StorageError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            self._delete_each(paths)

    def _delete_each(self, paths: dict[str, str]) -> None:
        """For stores that stop at the first that is gone."""
        for path, key in paths.items():
            with self._explain(key), suppress(FileNotFoundError):
                obstore.delete(self._backend, path)

    def download(self, key: str, path: Path) -> None:
        """Copy an object to a local file, whole or not at all; memory stays at one chunk."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            with self._explain(key), partial.open("wb") as file:
                for chunk in obstore.get(self._backend, self._key(key)).stream(min_chunk_size=DOWNLOAD_CHUNK_BYTES):
                    file.write(chunk)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @cached_property
    def _backend(self) -> Any:
        """Raises where the folder does not exist, as often as it is asked for."""
        return LocalStore(self._folder, automatic_cleanup=True) if self._folder else self._remote

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}".strip("/") if self._prefix else key

    def _truncated(self, key: str, end: int) -> StorageError:
        remedy = "the object is truncated; restore it or use an older one"
        return StorageError(f"{self.url_of(key)} ends before byte {end}", number=3, remedy=remedy)

    @contextmanager
    def _explain(self, key: str) -> Iterator[None]:
        where = self.url_of(key) if key else self.url
        try:
            yield
        except AlreadyExistsError as error:
            raise AlreadyExists(f"{where} exists already", number=1) from error
        except FileNotFoundError as error:
            remedy = "check the URL and that the bucket exists" if "://" in self.url else "check the path"
            raise StorageError(f"{where} does not exist", number=2, remedy=remedy) from error
        except (BaseError, OSError, ValueError) as error:
            if self._folder and not self._folder.exists():
                raise StorageError(f"{where} does not exist", number=2, remedy="check the path") from FileNotFoundError(
                    where
                )
            reason = str(error).split("\n")[0][:300]
            raise StorageError(f"{where}: {reason}", number=4, remedy=_remedy(reason)) from error


def _remedy(reason: str) -> str:
    text = reason.lower()
    if "no space" in text:
        return "free some disk space or point main.output_dir / checkpoint.storage elsewhere"
    if "nosuchbucket" in text or "bucket does not exist" in text or "404" in text:
        return "create the bucket or correct its name"
    if any(word in text for word in ("credential", "403", "401", "denied", "unauth")):
        return "check the credentials and that they may read and write there"
    return "check the URL, the network and the permissions; then run again"


def open_store(url: str | Path) -> Store:
    """The store at a folder or `s3://`, `gs://`, `az://`, `memory://` URL. Nothing is contacted yet.

    S3 takes credentials as boto3 would (environment, profile, instance role) and honours AWS_ENDPOINT_URL[_S3]; Google
    and Azure theirs from GOOGLE_* and AZURE_STORAGE_*. docs/stores.md lists them, and how to name an emulator.
    Raises StorageError for a scheme it does not know, and where there are no credentials.
    """
    url = str(url)
    scheme = url.partition("://")[0] if "://" in url else ""
    if scheme not in ("", "file", *REMOTE_SCHEMES):
        known = ", ".join(f"{s}://" for s in REMOTE_SCHEMES)
        raise StorageError(f"{url}: unknown scheme {scheme!r}", number=5, remedy=f"use a folder or one of {known}")
    if scheme == "memory":
        return Store(url, MemoryStore())
    if scheme in ("", "file"):
        path = Path(os.path.abspath(Path(url.removeprefix("file://")).expanduser()))
        file = next((place for place in (path, *path.parents) if place.is_file()), None)
        if file:
            raise StorageError(f"{file} is a file; a folder is needed there", number=8, remedy="name another place")
        return Store(str(path), folder=path)
    bucket, _, prefix = url.partition("://")[2].partition("/")
    if not bucket:
        raise StorageError(f"{url} names no bucket", number=6, remedy=f"write {scheme}://BUCKET/PREFIX")
    try:
        backend = connect(scheme, bucket)
    except Exception as error:  # botocore and obstore have their own families: no credentials, no such profile, …
        reason = str(error).split("\n")[0][:300]
        raise StorageError(
            f"{url}: {reason}",
            number=7,
            remedy=f"set up credentials ({CREDENTIALS[scheme]}); docs/stores.md lists them",
        ) from error
    return Store(url, backend, prefix.strip("/"))
