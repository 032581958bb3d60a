"""Saving and resuming with all ranks: every rank writes, all report, rank 0 commits; or all raise."""

import uuid
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flextrain.checkpoint.catalog import Catalog
from flextrain.checkpoint.manifest import Manifest, TensorEntry
from flextrain.checkpoint.reader import read_into
from flextrain.checkpoint.shards import State, allocate_optimizer_state, boxes_to_write, model_state, optimizer_state
from flextrain.checkpoint.writer import Written, write_boxes
from flextrain.errors import CheckpointCorrupt, CheckpointError, FlextrainError, unpack
from flextrain.log import get_logger

log = get_logger(__name__)


class CheckpointSaver:
    """Checkpoints of one model and optimizer below a catalog. Called by all ranks together, between two steps."""

    def __init__(
        self, catalog: Catalog, model: nn.Module, optimizer: torch.optim.Optimizer, keep_last_n: int = 3
    ) -> None:
        self.catalog, self._model, self._optimizer, self._keep_last_n = catalog, model, optimizer, keep_last_n

    def save(self, step: int, state: dict[str, Any]) -> Manifest:
        """Write and commit a checkpoint of `step`; returns its manifest once it is committed, on every rank.

        `state` is JSON: what the tensors do not say (position, seeds, config). Raises CheckpointError on every rank
        where any of them failed; what was committed before stays as it is.
        """
        attempt = _agree(lambda: uuid.uuid4().hex)
        folder = self.catalog.folder(step)

        def write() -> Written:
            return write_boxes(folder, attempt, _rank(), boxes_to_write(self._tensors()))

        parts = _all_or_none(write)
        manifest = merge(step, attempt, state, parts)

        def commit() -> None:
            self.catalog.commit(manifest)
            try:
                self.catalog.retire(self._keep_last_n)
            except FlextrainError as error:
                log.warning("old checkpoints were not all deleted: %s", error)

        _all_or_none(commit if _rank() == 0 else lambda: None)
        return manifest

    def resume(self) -> Manifest | None:
        """Load the newest sound checkpoint into model and optimizer; None where there is none.

        One found corrupt is set aside with a warning (its manifest is deleted, its data stay for the next retention),
        and the next older one is tried. Raises CheckpointMismatch where it belongs to another model.
        """
        while (step := _agree(lambda: max(self.catalog.steps(), default=None))) is not None:
            try:
                return self.load(self.catalog, step)
            except CheckpointCorrupt as error:
                log.warning("checkpoint of step %d is unsound and set aside: %s", step, error)
                if _rank() == 0:
                    self.catalog.set_aside(step)
        return None

    def resume_from(self, url: str) -> tuple[Manifest, str]:
        """Load the checkpoint at `url`, or the newest sound one before it in the same place; returns its URL too.

        Nothing is set aside: the place is another run's. Raises CheckpointCorrupt where none is sound.
        """
        catalog, last = Catalog.locate(url)
        steps = [step for step in _agree(catalog.steps) if step <= last] or [last]
        while True:
            step = steps.pop()
            try:
                return self.load(catalog, step), catalog.url_of(step)
            except CheckpointCorrupt as error:
                if not steps:
                    raise
                log.warning("the checkpoint of step %d is unsound, the one before is tried: %s", step, error)

    def load(self, catalog: Catalog, step: int) -> Manifest:
        """Load one checkpoint of any catalog; no older one is tried. Raises CheckpointError on every rank."""

        def read() -> Manifest:
            manifest = catalog.check(step)
            allocate_optimizer_state(self._optimizer)
            read_into(catalog.folder(step), manifest, self._tensors())
            return manifest

        manifest: Manifest = _all_or_none(read)[0]
        return manifest

    def _tensors(self) -> State:
        return model_state(self._model) | optimizer_state(self._model, self._optimizer)


def merge(step: int, attempt: str, state: dict[str, Any], parts: list[Written]) -> Manifest:
    """One manifest from what every rank wrote. Pure."""
    tensors: dict[str, TensorEntry] = {}
    for part in parts:
        for name, dtype, shape, shard in part.shards:
            known = tensors.get(name, TensorEntry(dtype, shape, ()))
            tensors[name] = TensorEntry(dtype, shape, (*known.shards, shard))
    objects = {name: entry for part in parts for name, entry in part.objects.items()}
    return Manifest(step, attempt, len(parts), state, tensors, objects)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _agree(choose: Callable[[], Any]) -> Any:
    """Rank 0's choice, on every rank."""
    return _all_or_none(lambda: choose() if _rank() == 0 else None)[0]


def _all_or_none(action: Callable[[], Any]) -> list[Any]:
    """Run `action` on every rank and gather the results in order of rank; where any raised, raise on all of them.

    The kind of error survives the journey: corrupt data are told from a wrong model, wherever they were found.
    """
    result: Any = None
    error: Exception | None = None
    try:
        result = action()
    except Exception as caught:  # reported to the others before it is raised: a silent rank would strand them
        error = caught
    if not dist.is_initialized():
        if error:
            raise error
        return [result]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (result, _packed(error)))
    if error:
        raise error
    for rank, (_, packed) in enumerate(gathered):
        if packed:
            raise unpack({**packed, "message": f"rank {rank}: {packed['message']}"})
    return [value for value, _ in gathered]


def _packed(error: Exception | None) -> dict[str, Any] | None:
    if error is None:
        return None
    if isinstance(error, FlextrainError):
        return error.pack()
    unexpected = CheckpointError(f"{type(error).__name__}: {error}", number=7, remedy="see the log of that rank")
    return unexpected.pack()
