"""Torch's distributed checkpoints (DCP) in this format: raw chunks with hashes, JSON instead of pickle, one commit.

    torch.distributed.checkpoint.save(state, storage_writer=FlextrainWriter(url))
    torch.distributed.checkpoint.load(state, storage_reader=FlextrainReader(url))

Torch plans which rank writes and reads what, and gathers every rank's error; saved on N ranks, it loads on M. The
reader takes the trainer's own checkpoints too: they are {"model": …, "optim": …}. Values that are no tensors are kept
as the bytes torch makes of them, and only those that load without running any code are taken, on both ways.
"""

import io
import uuid
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from flextrain.checkpoint.arena import Arena
from flextrain.checkpoint.catalog import (
    MANIFEST,
    STEP_FOLDER,
    check_objects,
    create_manifest,
    read_manifest,
)
from flextrain.checkpoint.commit import Attempt, merge
from flextrain.checkpoint.dcp_metadata import plain_planner_data, torch_metadata
from flextrain.checkpoint.manifest import ITEM_BYTES, OBJECT_NAME, Manifest
from flextrain.checkpoint.parts import Part, part_of
from flextrain.checkpoint.persist import persist
from flextrain.checkpoint.reader import read_boxes
from flextrain.checkpoint.shards import Box
from flextrain.checkpoint.snapshot import layout_of, slot_views
from flextrain.errors import CheckpointError, FlextrainError
from flextrain.storage import Store, open_store

Place = str | PathLike[str]


@dataclass(frozen=True)
class Seat:
    """What the coordinator gives each rank with its plan: the attempt they all write, and the rank's number in it."""

    attempt: Attempt
    rank: int


class FlextrainWriter(StorageWriter):
    """Saves one state at `url`, a folder or object-store URL that holds no checkpoint yet; nothing is overwritten.

    A rank's part is copied into memory once and written from there. Named like `step-00000100` below a run's
    `checkpoints`, it is listed and retired with the others.
    """

    def __init__(self, url: Place) -> None:
        self._folder = open_store(str(url))

    def reset(self, checkpoint_id: Place | None = None) -> None:
        if checkpoint_id:
            self._folder = open_store(str(checkpoint_id))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Place) -> bool:
        return _is_place(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise _unsupported("use_collectives=False", "ranks that do not speak cannot commit together")
        if is_coordinator and self._folder.size(MANIFEST) is not None:
            raise CheckpointError(
                f"{self._folder.url} holds a checkpoint already",
                number=20,
                remedy="name a new place for every save: nothing is overwritten",
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if not all(plan.usable for plan in plans):
            raise _unsupported("enable_plan_caching=True", "a cached plan names the files of an earlier save")
        step = STEP_FOLDER.match(self._folder.url.rpartition("/")[2])
        attempt = Attempt(int(step[1]) if step else 0, uuid.uuid4().hex, len(plans))
        return [replace(plan, storage_data=Seat(attempt, rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        seat: Seat = plan.storage_data
        try:
            part = _write(self._folder, seat, [_box(item, planner) for item in plan.items])
        except FlextrainError:
            raise
        except OSError as error:
            raise CheckpointError(
                f"rank {seat.rank} could not write its part of {self._folder.url}: {error}",
                number=7,
                remedy="free space or mend the disk; what was committed before is unharmed",
            ) from error
        return _done([WriteResult(item.index, 0, (seat.attempt, part)) for item in plan.items])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The coordinator's commit. Leftovers of saves to this place that failed before it are removed."""
        written = [result[0].storage_data for result in results if result]
        attempt: Attempt = written[0][0] if written else Attempt(0, uuid.uuid4().hex, len(results))
        state = {"dcp": plain_planner_data(metadata)}
        merged = merge(attempt, state, [part for _, part in written])
        manifest = Manifest.from_json(merged.to_json(), self._folder.url)  # what is committed can be read again
        create_manifest(self._folder, manifest)
        ours = f"{attempt.name}/"
        keys = [entry.key for entry in self._folder.list() if not entry.key.startswith(ours)]
        self._folder.delete([key for key in keys if OBJECT_NAME.fullmatch(key)])


class FlextrainReader(StorageReader):
    """Loads what FlextrainWriter or the trainer saved at `url`; every byte used is verified."""

    def __init__(self, url: Place) -> None:
        self._folder = open_store(str(url))
        self._manifest: Manifest | None = None

    def reset(self, checkpoint_id: Place | None = None) -> None:
        self._manifest = None
        if checkpoint_id:
            self._folder = open_store(str(checkpoint_id))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Place) -> bool:
        return _is_place(checkpoint_id)

    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        # Not `**kwargs`: torch would take that name for an offer to load without the other ranks where this one fails.
        self._manifest = read_manifest(self._folder)
        check_objects(self._folder, self._manifest)
        return torch_metadata(self._manifest, self._folder.url_of(MANIFEST))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        assert self._manifest, "read_metadata comes first"
        jobs = [_Job(self._manifest, item, planner) for item in plan.items]
        read_boxes(self._folder, self._manifest, [job.box for job in jobs])
        for job in jobs:
            job.finish(self._folder.url)
        return _done(None)


class _Job:
    """One item to read: the box it fills, and how it gets from there to where the planner wants it."""

    def __init__(self, manifest: Manifest, item: ReadItem, planner: LoadPlanner) -> None:
        self._item, self._planner = item, planner
        self._target: Tensor | None = None
        name, entry = item.storage_index.fqn, manifest.tensors[item.storage_index.fqn]
        start, shape = (0,) * len(entry.shape), entry.shape
        if item.type == LoadItemType.TENSOR:
            self._target = planner.resolve_tensor(item).detach()
            origin = item.storage_index.offset or start
            start = tuple(a + b for a, b in zip(origin, item.storage_offsets, strict=True))
            shape = tuple(item.lengths)
        dtype: torch.dtype = getattr(torch, entry.dtype)
        local = self._target
        if local is None or local.dtype != dtype:
            local = torch.zeros(shape, dtype=dtype)
        self.box = Box(name, local, start, entry.shape)

    def finish(self, where: str) -> None:
        if self._target is None:
            raw = self.box.local.numpy().tobytes()
            self._planner.load_bytes(self._item, _without_code(raw, f"{where}: {self.box.name}"))
            return
        if self._target is not self.box.local:
            self._target.copy_(self.box.local)
        self._planner.commit_tensor(self._item, self._target)


def _box(item: WriteItem, planner: SavePlanner) -> Box:
    """The data of one item. Raises CheckpointError for what this format does not hold."""
    name, data = item.index.fqn, planner.resolve_data(item)
    if isinstance(data, io.BytesIO):
        raw = data.getvalue()
        _without_code(raw, name)
        return Box(name, torch.frombuffer(bytearray(raw), dtype=torch.uint8), (0,), (len(raw),))
    dtype = str(data.dtype).removeprefix("torch.")
    if data.layout != torch.strided or dtype not in ITEM_BYTES:
        raise CheckpointError(
            f"{name} is a tensor of {data.dtype} and layout {data.layout}, which cannot be saved",
            number=22,
            remedy=f"convert it to a dense tensor of {', '.join(ITEM_BYTES)}",
        )
    assert item.tensor_data
    chunk = item.tensor_data.chunk
    assert data.shape == chunk.sizes, (name, data.shape, chunk)
    return Box(name, data.detach(), tuple(chunk.offsets), tuple(item.tensor_data.size))


def _write(folder: Store, seat: Seat, boxes: list[Box]) -> Part:
    """One object with all of a rank's boxes, copied side by side into memory first."""
    layout, name = layout_of(boxes), seat.attempt.data(seat.rank)
    arena = Arena.create(layout, slots=1)
    try:
        for view, box in zip(slot_views(arena, 0), boxes, strict=True):
            view.copy_(box.local)
        if not boxes:
            return Part()
        return part_of(layout, name, persist(folder, folder, name, arena.slot(0), layout.size_bytes))
    finally:
        arena.close()


def _without_code(raw: bytes, what: str) -> io.BytesIO:
    """Bytes of torch.save that hold the same value, written anew by this process from what loads without running code.

    Torch's planner unpickles whatever it is given; it is never given the bytes that a checkpoint brought.
    """
    try:
        value = torch.load(io.BytesIO(raw), weights_only=True, map_location="cpu")
    except Exception as error:  # pickle, zipfile and torch raise many kinds for bytes that somebody made up
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise CheckpointError(
            f"{what} holds a value that does not load without running code: {reason}",
            number=21,
            remedy="save tensors, numbers, text, lists, dicts; a class you trust: torch.serialization.add_safe_globals",
        ) from error
    clean = io.BytesIO()
    torch.save(value, clean)
    clean.seek(0)
    return clean


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _is_place(checkpoint_id: Place) -> bool:
    try:
        open_store(str(checkpoint_id))
    except FlextrainError:
        return False
    return True


def _unsupported(option: str, why: str) -> CheckpointError:
    return CheckpointError(f"{option} does not go with FlextrainWriter: {why}", number=23, remedy="leave it out")
