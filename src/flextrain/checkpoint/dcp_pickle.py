"""The metadata of torch's own checkpoint folders, which is a pickle, read without running any code.

The names that torch's metadata consist of lead to plain records here, none to the class or function of that name; any
other name ends the reading. So nothing that a pickle calls, builds or sets can do more than make such records.
"""

import io
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flextrain.checkpoint.manifest import ITEM_BYTES
from flextrain.errors import CheckpointError

METADATA = "torch.distributed.checkpoint.metadata"
RECORDS = {
    *((METADATA, name) for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata")),
    *((METADATA, name) for name in ("BytesStorageMetadata", "MetadataIndex", "StorageMeta")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
NAMES: dict[tuple[str, str], Callable[..., Any]] = {
    (METADATA, "_MEM_FORMAT_ENCODING"): lambda *value: value,
    ("torch", "Size"): lambda sizes=(): tuple(sizes),
    ("torch.serialization", "_get_layout"): str,
    **{("pathlib", name): lambda *parts: "/".join(map(str, parts)) for name in ("Path", "PosixPath", "WindowsPath")},
    **{("pathlib._local", name): lambda *parts: "/".join(map(str, parts)) for name in ("PosixPath", "WindowsPath")},
}
DTYPE = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class Piece:
    """Where bytes of an entry lie: of a tensor's part that begins at index `start` and spans `shape`, or of a value
    (None and None)."""

    start: tuple[int, ...] | None
    shape: tuple[int, ...] | None
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Described:
    """An entry of a folder: a tensor's dtype and shape, or None and None for any other value; and its pieces."""

    dtype: str | None
    shape: tuple[int, ...] | None
    pieces: tuple[Piece, ...]


def described(path: Path) -> dict[str, Described]:
    """The entries that a `.metadata` file describes. Raises CheckpointError for one that is unsound, or that names
    anything but torch's metadata; OSError where it cannot be read."""
    raw = path.read_bytes()
    try:
        return _entries(_Unpickler(raw).load())
    except CheckpointError as error:
        raise _refused(path, error.text) from error
    except Exception as error:  # a pickle that somebody made up ends in any of them
        raise _refused(path, f"{type(error).__name__}: {error}") from error


def _refused(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is no sound metadata of torch.distributed.checkpoint: {why}",
        number=61,
        remedy="get the folder from a source that you trust; what it names might run on your machine elsewhere",
    )


class _Unpickler(pickle._Unpickler):
    """The interpreter in Python: what it builds is an instance of one of the classes below or a plain value."""

    def __init__(self, raw: bytes) -> None:
        super().__init__(io.BytesIO(raw))
        self._record = type("Record", (_Record,), {})  # of this reading alone: a pickle may set attributes of a class

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in RECORDS:
            return self._record
        if (module, name) in NAMES:
            known = NAMES[module, name]
            return lambda *args: known(*args)
        if module == "torch" and DTYPE.fullmatch(name) and isinstance(getattr(torch, name, None), torch.dtype):
            return str(getattr(torch, name)).removeprefix("torch.")
        raise CheckpointError(f"it names {module}.{name}, which no such metadata need", number=61)


class _Record:
    """Anything with attributes."""

    def __setstate__(self, state: Any) -> None:
        fields = state if isinstance(state, dict) else {"values": tuple(state)}
        vars(self).update({str(name): value for name, value in fields.items()})


def _entries(metadata: Any) -> dict[str, Described]:
    pieces: dict[str, list[tuple[Any, Any]]] = {str(name): [] for name in metadata.state_dict_metadata}
    for index, info in (metadata.storage_data or {}).items():
        if getattr(info, "transform_descriptors", None):
            raise ValueError(f"{index.fqn} is stored with the extension {info.transform_descriptors}")
        pieces[index.fqn].append((index, info))
    return {name: _entry(entry, pieces[str(name)]) for name, entry in metadata.state_dict_metadata.items()}


def _entry(entry: Any, stored: list[tuple[Any, Any]]) -> Described:
    if not hasattr(entry, "size"):
        return Described(None, None, tuple(_piece(None, None, info) for _, info in stored))
    dtype, shape = entry.properties.values[0], tuple(map(int, entry.size))
    if dtype not in ITEM_BYTES:
        raise ValueError(f"a tensor is of {dtype}, which this format does not hold")
    sizes = {tuple(map(int, chunk.offsets)): tuple(map(int, chunk.sizes)) for chunk in entry.chunks}
    starts = [tuple(map(int, index.offset)) if index.offset is not None else (0,) * len(shape) for index, _ in stored]
    found = {start: _piece(start, sizes[start], info) for start, (_, info) in zip(starts, stored, strict=True)}
    return Described(dtype, shape, tuple(found.values()))


def _piece(start: Any, shape: Any, info: Any) -> Piece:
    if not isinstance(info.relative_path, str):
        raise ValueError(f"a file is named {info.relative_path!r}")
    return Piece(start, shape, info.relative_path, int(info.offset), int(info.length))
