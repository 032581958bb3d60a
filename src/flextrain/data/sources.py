"""From what the config names (`stdlib`, files, folders, globs, URLs, `hf:NAME`) to sources in one fixed order."""

import glob
import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from flextrain.data.documents import Document, Source, Tally
from flextrain.data.hub import load_hub_dataset
from flextrain.data.readers import read_documents, unreadable
from flextrain.errors import DataError, StorageError
from flextrain.storage import Entry, Store, open_store

SUFFIXES = (".txt", ".jsonl", ".parquet")
# Folders of a standard library that hold tests, or that are not of the library.
NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class FileSource:
    """A local file."""

    name: str
    path: Path
    size_bytes: int
    text_key: str

    @property
    def place(self) -> str:
        return str(self.path)

    def identity(self) -> str:
        """sha256 of the content. Raises DataError where it cannot be read."""
        try:
            with self.path.open("rb") as file:
                return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise unreadable(self.place, error) from error

    def documents(self, tally: Tally) -> Iterator[Document]:
        yield from read_documents(self.path, self, tally)


@dataclass(frozen=True)
class ObjectSource:
    """An object in a bucket; each pass over it downloads it into a temporary folder."""

    name: str
    store: Store
    key: str
    size_bytes: int
    modified: datetime
    text_key: str

    @property
    def place(self) -> str:
        return self.store.url_of(self.key)

    def identity(self) -> str:
        """Time of the last change: object stores replace objects whole, and hashing would download them."""
        return f"modified:{self.modified.isoformat()}"

    def documents(self, tally: Tally) -> Iterator[Document]:
        with TemporaryDirectory(prefix="flextrain-") as folder:
            path = Path(folder) / PurePosixPath(self.key).name
            self.store.download(self.key, path)
            yield from read_documents(path, self, tally)


def resolve_sources(specs: Sequence[str], text_key: str) -> list[Source]:
    """Every source that `specs` name, in order, each once. Raises DataError or StorageError for what is not there."""
    found: dict[str, Source] = {}
    for spec in specs:
        for source in _resolve(spec, text_key):
            found.setdefault(source.place, source)
    return list(found.values())


def _resolve(spec: str, text_key: str) -> list[Source]:
    if spec == "stdlib":
        return list(_stdlib(text_key))
    if spec.startswith("hf:"):
        return [load_hub_dataset(spec, text_key)]
    if "://" in spec and not spec.startswith("file://"):
        return list(_objects(spec, text_key))
    path = Path(spec.removeprefix("file://")).expanduser()
    try:
        return list(_paths(spec, path, text_key))
    except OSError as error:
        raise unreadable(spec, error) from error


def _stdlib(text_key: str) -> Iterator[FileSource]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        below = path.relative_to(root)
        if not NOT_STDLIB & set(below.parts):
            yield FileSource(below.as_posix(), path, path.stat().st_size, text_key)


def _paths(spec: str, path: Path, text_key: str) -> Iterator[FileSource]:
    if path.is_dir():
        root, paths = path, [p for p in path.rglob("*") if p.is_file() and p.suffix.lower() in SUFFIXES]
    elif path.exists():
        if path.suffix.lower() not in SUFFIXES:
            raise _unknown_suffix(spec)
        root, paths = path.parent, [path]
    else:
        matches = [Path(p) for p in glob.glob(str(path), recursive=True) if glob.has_magic(str(path))]
        root = _glob_root(path)
        paths = [p for p in matches if p.is_file() and p.suffix.lower() in SUFFIXES]
        if matches and not paths:
            raise _unknown_suffix(spec)
    if not paths:
        raise _nothing_there(spec, path)
    for file in sorted(paths):
        yield FileSource(file.relative_to(root).as_posix(), file.absolute(), file.stat().st_size, text_key)


def _glob_root(pattern: Path) -> Path:
    """The folder in front of the first wildcard."""
    root = Path(pattern.anchor)
    for part in pattern.relative_to(pattern.anchor).parts[:-1]:
        if glob.has_magic(part):
            break
        root /= part
    return root


def _nothing_there(spec: str, path: Path) -> DataError:
    kinds = ", ".join(SUFFIXES)
    if path.is_dir():
        found, remedy = f"the folder {spec} holds no file of a known kind", f"put {kinds} files into it"
    elif glob.has_magic(spec):
        found, remedy = f"nothing matches {spec}", f"correct the pattern; it should match {kinds} files"
    else:
        found, remedy = f"{spec} does not exist", "correct data.sources, or start from the folder it is relative to"
    return DataError(found, number=1, remedy=remedy)


def _unknown_suffix(spec: str) -> DataError:
    return DataError(
        f"{spec} is of no kind that can be read; expected {', '.join(SUFFIXES)}",
        number=2,
        remedy="rename it to .txt if it is plain text, or convert it",
    )


def _objects(url: str, text_key: str) -> Iterator[ObjectSource]:
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.rstrip("/").partition("/")
    store = open_store(f"{scheme}://{bucket}")
    for entry in _entries(store, key, url):
        below = PurePosixPath(entry.key)
        name = below.name if entry.key == key else below.relative_to(key or ".").as_posix()
        yield ObjectSource(name, store, entry.key, entry.size_bytes, entry.modified, text_key)


def _entries(store: Store, key: str, url: str) -> list[Entry]:
    """The object `key`, or those of a known kind below it."""
    if key.lower().endswith(SUFFIXES):
        entry = store.stat(key)
        if entry:
            return [entry]
    entries = [entry for entry in store.list(key) if entry.key.lower().endswith(SUFFIXES)]
    if not entries:
        raise StorageError(
            f"{url} holds no {', '.join(SUFFIXES)} object",
            number=2,
            remedy="check bucket and prefix; a prefix is whole path segments",
        )
    return entries
