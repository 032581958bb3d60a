"""A checkpoint in the formats of others: safetensors, which `transformers` loads, and torch's own DCP."""

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flextrain.checkpoint.catalog import check_objects, read_manifest
from flextrain.checkpoint.manifest import ITEM_BYTES, Manifest, TensorEntry
from flextrain.checkpoint.reader import check_fits, read_boxes
from flextrain.checkpoint.recorded import recorded_config
from flextrain.checkpoint.shards import Box, model_state
from flextrain.errors import CheckpointError, CheckpointMismatch, FlextrainError
from flextrain.storage import Store, open_store

WEIGHTS = "model."
FILE_BYTES = 5 << 30  # what hubs take well


def export_safetensors(url: str, out: str | Path, *, max_file_bytes: int = FILE_BYTES) -> list[str]:
    """Write the weights of the checkpoint at `url` into the new folder `out`, under plain names; returns its files.

    Where the run's configuration names a model of transformers, config.json is there too and
    AutoModelForCausalLM.from_pretrained(out) loads the folder. More than `max_file_bytes` are split over files with
    model.safetensors.index.json beside them; memory stays at one file. Raises CheckpointError or ModelError.
    """
    from safetensors.torch import save_file

    folder, manifest = _opened(url)
    weights = {name.removeprefix(WEIGHTS): e for name, e in manifest.tensors.items() if name.startswith(WEIGHTS)}
    if not weights:
        raise CheckpointMismatch(
            f"{folder.url} holds no weights: no name in it begins with {WEIGHTS}",
            number=26,
            remedy="save the model's state under the key `model`, or export with --format dcp",
        )
    described = _described(manifest, weights, folder.url)
    files = split({name: _size_bytes(entry) for name, entry in weights.items()}, max_file_bytes)
    with _new_folder(out) as made:
        for file, names in files.items():
            tensors = _read(folder, manifest, {name: WEIGHTS + name for name in names})
            facts = {"format": "pt", "step": str(manifest.step), "checkpoint": manifest.digest}
            save_file(tensors, made / file, metadata=facts)
        if len(files) > 1:
            total = sum(_size_bytes(entry) for entry in weights.values())
            index = {
                "metadata": {"total_size": total},
                "weight_map": {name: file for file, names in files.items() for name in names},
            }
            (made / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
        if described is not None:
            described.config.save_pretrained(made)
        return sorted(path.name for path in made.iterdir())


def export_dcp(url: str, out: str | Path) -> list[str]:
    """Write all of the checkpoint at `url` into the new folder `out` as torch.distributed.checkpoint does.

    It is {"model": weights by name, "optim": optimizer state by name, "state": the run's facts as JSON text}; whoever
    saved with FlextrainWriter gets back what was saved. Needs memory for the whole state. Raises CheckpointError.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    from flextrain.checkpoint.dcp import FlextrainReader

    folder, manifest = _opened(url)
    state: dict[str, Any] = {}
    with _torch_errors(folder.url), _new_folder(out) as made:
        reader = FlextrainReader(folder.url)
        _load_state_dict(state, storage_reader=reader, no_dist=True, planner=_EmptyStateDictLoadPlanner())
        if "dcp" not in manifest.state:
            state["state"] = json.dumps({"step": manifest.step, **manifest.state})
        dcp.save(state, storage_writer=dcp.FileSystemWriter(made), no_dist=True)
        return sorted(path.name for path in made.iterdir())


def split(sizes: Mapping[str, int], max_bytes: int) -> dict[str, list[str]]:
    """File name -> the names it holds, in order, each file up to `max_bytes` or one tensor that is larger. Pure."""
    groups: list[list[str]] = [[]]
    free = max_bytes
    for name, size_bytes in sizes.items():
        if size_bytes > free and groups[-1]:
            groups.append([])
            free = max_bytes
        groups[-1].append(name)
        free -= size_bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, start=1)}


def _opened(url: str) -> tuple[Store, Manifest]:
    folder = open_store(url)
    manifest = read_manifest(folder)
    check_objects(folder, manifest)
    return folder, manifest


def _described(manifest: Manifest, weights: Mapping[str, TensorEntry], where: str) -> Any:
    """The transformers model that these weights belong to, on the meta device; None for any other."""
    config = recorded_config(manifest, where)
    if config is None or config.model.name == "gpt":
        return None
    from flextrain.model.hub import describe_causal_lm

    model = describe_causal_lm(config.model, {name: entry.shape for name, entry in weights.items()})
    check_fits({WEIGHTS + name: entry for name, entry in weights.items()}, model_state(model), where)
    return model


def _read(folder: Store, manifest: Manifest, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Whole tensors by new name, from a mapping of those to the names in the manifest."""
    tensors: dict[str, Tensor] = {}
    boxes = []
    for new, name in names.items():
        entry = manifest.tensors[name]
        tensors[new] = torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype))
        boxes.append(Box(name, tensors[new], (0,) * len(entry.shape), entry.shape))
    read_boxes(folder, manifest, boxes)
    return tensors


def _size_bytes(entry: TensorEntry) -> int:
    return prod(entry.shape) * ITEM_BYTES[entry.dtype]


@contextmanager
def _new_folder(out: str | Path) -> Iterator[Path]:
    """A folder that appears at `out` when it is whole, or not at all."""
    place = Path(out).expanduser()
    if "://" in str(out) or (place.exists() and (not place.is_dir() or any(place.iterdir()))):
        raise CheckpointError(
            f"{out} is not a folder that an export could make: it is there and not empty, or no place of this machine",
            number=24,
            remedy="name a folder of this machine that does not exist yet; copy it from there",
        )
    from safetensors import SafetensorError

    partial = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(place)
    except FlextrainError:
        raise
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{place} cannot be written: {error}", number=25, remedy="free space, or name another place"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _torch_errors(where: str) -> Iterator[None]:
    """Torch gathers errors in one that is not even an Exception; here there is one process and one error."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")
            yield
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, FlextrainError):
            raise cause from error
        raise CheckpointError(
            f"{where} cannot be exported: {cause}", number=25, remedy="free space, or name another place"
        ) from error
