"""Checkpoints of others become ours: safetensors, as `transformers` saves them, and folders of torch's own DCP.

No byte of them runs as code, and no more of them is in memory than one object of the new checkpoint holds.
"""

import io
import json
import os
import pickle
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flextrain.checkpoint.arena import Arena
from flextrain.checkpoint.catalog import MANIFEST, STEP_FOLDER, create_manifest, step_folder
from flextrain.checkpoint.commit import Attempt, merge
from flextrain.checkpoint.dcp_pickle import Described, Piece, described
from flextrain.checkpoint.manifest import ITEM_BYTES, Manifest, ObjectEntry
from flextrain.checkpoint.parts import Part, part_of
from flextrain.checkpoint.persist import persist
from flextrain.checkpoint.shards import Box
from flextrain.checkpoint.snapshot import layout_of, slot_views
from flextrain.checkpoint.sources import open_below
from flextrain.checkpoint.tiling import Tiling
from flextrain.errors import CheckpointError, FlextrainError, StorageError
from flextrain.storage import Store, open_store

OBJECT_BYTES = 256 << 20  # of several tensors; a larger one has an object of its own
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Incoming:
    """A tensor to import: `fill` puts its values into a tensor of this dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    fill: Callable[[Tensor], None]

    def like(self) -> Tensor:
        """A tensor of this kind that takes no memory."""
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device="meta")


@dataclass
class Imported:
    """What came of an import: the new checkpoint's URL and manifest, and what the source holds that it does not."""

    url: str
    manifest: Manifest
    left_out: list[str] = field(default_factory=list)


def import_checkpoint(source: str | Path, out: str, kind: str | None = None) -> Imported:
    """Commit what the folder `source` holds as a checkpoint at `out`: `out` itself where it is named like
    step-00000100, else a folder so named in it, after the step that `source` records, or 0.

    `kind` is "safetensors" or "dcp"; None looks. Raises CheckpointError for a source that is unsound or of neither
    kind, and where there is a checkpoint already; StorageError where `out` cannot be written.
    """
    folder = Path(source).expanduser()
    if kind is None:
        kind = "dcp" if (folder / ".metadata").is_file() else "safetensors"
    read = from_dcp if kind == "dcp" else from_safetensors
    with _explained(folder), read(folder) as (tensors, state, left_out):
        return _write(tensors, state, left_out, out)


Opened = tuple[list[Incoming], dict[str, Any], list[str]]


@contextmanager
def from_safetensors(folder: Path) -> Iterator[Opened]:
    """The tensors of model.safetensors, or of the files that its index names, as weights of a model."""
    from safetensors import safe_open

    tensors: list[Incoming] = []
    state: dict[str, Any] = {}
    for file in _safetensors_files(folder):
        with safe_open(folder / file, framework="pt") as opened:
            step = (opened.metadata() or {}).get("step", "")
            state |= {"step": int(step)} if step.isdecimal() else {}
            for name in opened.keys():  # noqa: SIM118 it is no dict
                part = opened.get_slice(name)
                dtype = DTYPES.get(part.get_dtype(), part.get_dtype())
                fill = _FromSafetensors(folder / file, name)
                tensors.append(_known(Incoming(f"model.{name}", dtype, tuple(part.get_shape()), fill)))
    twice = [name for name, count in Counter(one.name for one in tensors).items() if count > 1]
    if twice:
        raise _unsound(folder, f"{twice[0]} is in two of its files")
    yield tensors, state, []


DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "BOOL": "bool",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "C64": "complex64",
}


@dataclass(frozen=True)
class _FromSafetensors:
    path: Path
    name: str

    def __call__(self, into: Tensor) -> None:
        from safetensors import safe_open

        with safe_open(self.path, framework="pt") as opened:
            into.copy_(opened.get_tensor(self.name))


def _safetensors_files(folder: Path) -> list[str]:
    if not (folder / INDEX).is_file():
        if (folder / "model.safetensors").is_file():
            return ["model.safetensors"]
        raise _unsound(folder, f"it holds neither .metadata, nor model.safetensors, nor {INDEX}")
    weights = json.loads((folder / INDEX).read_bytes())["weight_map"]
    return sorted({_plain(str(file)) for file in weights.values()})


@contextmanager
def from_dcp(folder: Path) -> Iterator[Opened]:
    """The tensors of a folder that torch.distributed.checkpoint.save made, under the names a trainer gives them.

    It is {"model": …, "optim": …}, as `flextrain checkpoint export` writes it or with an optimizer's own
    {"state": …, "param_groups": …}; names that are under neither are a model's, where none is under `model`.
    """
    found = described(folder / ".metadata")
    _check_room(folder, found)
    tensors = {name: entry for name, entry in found.items() if entry.dtype}
    values = sorted(found.keys() - tensors.keys())
    new_name = _naming(tensors)
    state = _recorded(folder, found["state"]) if "state" in values else {}
    left_out = [name for name in values if name != "state" or not state]
    yield [_of_pieces(folder, new_name(name), entry) for name, entry in sorted(tensors.items())], state, left_out


def _naming(names: Iterable[str]) -> Callable[[str], str]:
    below = {name.split(".")[0] for name in names}
    if "model" not in below:
        return lambda name: name if name.startswith("optim.") else f"model.{name}"
    if all(name.startswith("optim.state.") for name in names if name.startswith("optim.")):
        return lambda name: f"optim.{name.removeprefix('optim.state.')}" if name.startswith("optim.") else name
    return lambda name: name


def _check_room(folder: Path, found: dict[str, Described]) -> None:
    """Raises CheckpointError unless every tensor is tiled by pieces with as many bytes, which files have: nothing makes
    us take more memory than the folder takes on the disk."""
    tiling, used = Tiling(), dict[str, int]()
    for name, entry in found.items():
        for piece in entry.pieces:
            used[_plain(piece.file)] = used.get(piece.file, 0) + piece.length
            if piece.offset < 0 or piece.length < _needed(entry.dtype, piece.shape):
                raise _unsound(folder, f"{name} lies at byte {piece.offset} of {piece.file} in {piece.length} bytes")
        boxes = [(piece.start or (), piece.shape or ()) for piece in entry.pieces]
        if entry.shape is not None and 0 not in entry.shape and not tiling.is_exact(entry.shape, boxes):
            raise _unsound(folder, f"the pieces of {name} do not tile its shape {list(entry.shape)}")
    for file, size_bytes in used.items():
        if (folder / file).stat().st_size < size_bytes:
            raise _unsound(folder, f"{file} is shorter than what is said to lie in it")


def _needed(dtype: str | None, shape: tuple[int, ...] | None) -> int:
    if dtype is None or shape is None:
        return 0
    if min(shape, default=0) < 0:
        raise ValueError(f"a piece has the shape {list(shape)}")
    return prod(shape) * ITEM_BYTES[dtype]


def _of_pieces(folder: Path, name: str, entry: Described) -> Incoming:
    assert entry.dtype is not None
    assert entry.shape is not None

    def fill(into: Tensor) -> None:
        for piece in entry.pieces:
            value = _loaded(folder, piece)
            if not isinstance(value, Tensor) or (value.dtype, tuple(value.shape)) != (into.dtype, piece.shape):
                raise _unsound(folder, f"{piece.file} holds something else for {name} at byte {piece.offset}")
            assert piece.start is not None
            assert piece.shape is not None
            into[tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))].copy_(value)

    return _known(Incoming(name, entry.dtype, entry.shape, fill))


def _recorded(folder: Path, entry: Described) -> dict[str, Any]:
    """The facts of the run that `export_dcp` records; empty where this is something else."""
    value = _loaded(folder, entry.pieces[0]) if len(entry.pieces) == 1 else None
    try:
        return dict(json.loads(value)) if isinstance(value, str) else {}
    except ValueError:
        return {}


def _loaded(folder: Path, piece: Piece) -> Any:
    """What torch saved there; raises pickle.UnpicklingError where loading it takes code."""
    with os.fdopen(open_below(folder, _plain(piece.file)), "rb") as file:
        file.seek(piece.offset)
        return torch.load(io.BytesIO(file.read(piece.length)), weights_only=True, map_location="cpu")


def _write(tensors: list[Incoming], state: dict[str, Any], left_out: list[str], out: str) -> Imported:
    """The new checkpoint: object by object, then the commit."""
    store = open_store(out)
    named = STEP_FOLDER.match(store.url.rpartition("/")[2])
    recorded = int(state.pop("step", 0))
    step = int(named[1]) if named else recorded
    folder = store if named else store.child(step_folder(step))
    if folder.size(MANIFEST) is not None:
        raise CheckpointError(
            f"{folder.url} holds a checkpoint already", number=20, remedy="name a new place: nothing is overwritten"
        )
    attempt = Attempt(step, uuid.uuid4().hex, 1)
    try:
        parts = [_write_object(folder, attempt.data(index), group) for index, group in enumerate(_grouped(tensors))]
        merged = merge(attempt, state, parts)
        manifest = Manifest.from_json(merged.to_json(), folder.url)  # what is committed can be read again
        create_manifest(folder, manifest)
    except Exception:
        folder.delete([entry.key for entry in folder.list(attempt.name)])
        raise
    return Imported(folder.url, manifest, left_out)


def _grouped(tensors: list[Incoming]) -> Iterator[list[Incoming]]:
    group: list[Incoming] = []
    free = OBJECT_BYTES
    for tensor in tensors:
        free -= tensor.like().nbytes
        if group and free < 0:
            yield group
            group, free = [], OBJECT_BYTES - tensor.like().nbytes
        group.append(tensor)
    if group:
        yield group


def _write_object(folder: Store, name: str, tensors: list[Incoming]) -> Part:
    boxes = [Box(one.name, one.like(), (0,) * len(one.shape), one.shape) for one in tensors]
    arena = Arena.create(layout_of(boxes), slots=1)
    try:
        for view, one in zip(slot_views(arena, 0), tensors, strict=True):
            one.fill(view)
        return part_of(arena.layout, name, _persisted(folder, name, arena))
    finally:
        arena.close()


def _persisted(folder: Store, name: str, arena: Arena) -> ObjectEntry:
    try:
        return persist(folder, folder, name, arena.slot(0), arena.layout.size_bytes)
    except FlextrainError:
        raise
    except OSError as error:
        raise StorageError(
            f"{folder.url_of(name)}: {error.strerror}", number=4, remedy="free space, or name another place"
        ) from error


def _known(tensor: Incoming) -> Incoming:
    if tensor.dtype not in ITEM_BYTES:
        raise CheckpointError(
            f"{tensor.name} is a tensor of {tensor.dtype}, which cannot be saved",
            number=22,
            remedy=f"convert it to a dense tensor of {', '.join(ITEM_BYTES)}",
        )
    return tensor


def _plain(file: str) -> str:
    """The name of a file in the folder itself; raises ValueError for one that leads elsewhere."""
    if file in ("", ".", "..") or "/" in file or "\0" in file:
        raise ValueError(f"the file {file!r} does not lie in the folder")
    return file


def _unsound(folder: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{folder} cannot be imported: {why}",
        number=62,
        remedy="name a folder of safetensors, or one that torch.distributed.checkpoint.save made; or mend it",
    )


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """What the readers of other formats raise, as an error of ours."""
    from safetensors import SafetensorError

    try:
        yield
    except FlextrainError:
        raise
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, ValueError, KeyError, TypeError, EOFError) as error:
        raise _unsound(folder, (str(error).strip() or type(error).__name__).splitlines()[0][:300]) from error
    except OSError as error:
        raise _unsound(folder, f"{error.strerror}: {error.filename}") from error
