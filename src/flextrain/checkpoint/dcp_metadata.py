"""DCP's metadata as a manifest tells it, and back: what torch keeps as a pickle, here as checked JSON.

A manifest's state says under "dcp" which entries are bytes (1-D uint8 tensors here), and where in a nested state each
entry stands. A checkpoint of the trainer has no such record: its names say it.
"""

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from flextrain.checkpoint.manifest import Manifest, TensorEntry
from flextrain.errors import CheckpointCorrupt, CheckpointError

Paths = dict[str, tuple[str | int, ...]]


def plain_planner_data(metadata: Metadata) -> dict[str, Any]:
    """What a manifest records of DCP's metadata besides tensors. Raises CheckpointError for a planner's own objects."""
    paths = metadata.planner_data
    if paths is not None and not _are_paths(paths):
        raise CheckpointError(
            f"the planner keeps {type(paths).__name__} data with the checkpoint, which JSON cannot hold",
            number=22,
            remedy="use DefaultSavePlanner, or one whose planner_data are names and their paths, or None",
        )
    entries = metadata.state_dict_metadata
    found = [name for name, entry in entries.items() if isinstance(entry, BytesStorageMetadata)]
    return {"bytes": found, "paths": paths}


def torch_metadata(manifest: Manifest, where: str) -> Metadata:
    """DCP's metadata of a checkpoint. Raises CheckpointCorrupt where the record contradicts the tensors."""
    record = manifest.state.get("dcp")
    try:
        as_bytes, paths = _checked(record, manifest.tensors) if record is not None else (set[str](), _own(manifest))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointCorrupt(
            f"{where}: its record for torch.distributed.checkpoint is unsound ({error})",
            number=1,
            remedy="an older checkpoint is used where there is one",
        ) from error
    entries: dict[str, STORAGE_TYPES] = {
        name: BytesStorageMetadata() if name in as_bytes else _tensor(entry) for name, entry in manifest.tensors.items()
    }
    return Metadata(entries, planner_data=paths)


def _checked(record: dict[str, Any], tensors: dict[str, TensorEntry]) -> tuple[set[str], Paths | None]:
    for name in record["bytes"]:
        if tensors[name].dtype != "uint8" or len(tensors[name].shape) != 1:
            raise ValueError(f"{name} is said to be bytes and is a tensor of {tensors[name].dtype}")
    if record["paths"] is None:
        return set(record["bytes"]), None
    paths = {name: tuple(path) for name, path in record["paths"].items()}
    if not _are_paths(paths) or tensors.keys() - paths.keys():
        raise ValueError("paths are not one per entry, of names and positions")
    return set(record["bytes"]), paths


def _are_paths(value: Any) -> bool:
    """Whether these are names and the keys that lead to each; a position counts entries, so it is below their number:
    torch extends a list to any position it reads."""
    return isinstance(value, dict) and all(
        isinstance(name, str) and path and all(type(k) is str or (type(k) is int and 0 <= k < len(value)) for k in path)
        for name, path in value.items()
    )


def _own(manifest: Manifest) -> Paths:
    return {name: tuple(name.split(".", 1)) for name in manifest.tensors}


def _tensor(entry: TensorEntry) -> TensorStorageMetadata:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    chunks = [ChunkStorageMetadata(torch.Size(shard.start), torch.Size(shard.shape)) for shard in entry.shards]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(entry.shape), chunks)
