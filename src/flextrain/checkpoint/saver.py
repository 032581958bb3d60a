"""Saving and resuming with all ranks: a save is a copy between two steps, and a process beside does the rest."""

import uuid
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flextrain.checkpoint.arena import Arena
from flextrain.checkpoint.catalog import Catalog
from flextrain.checkpoint.manifest import Manifest
from flextrain.checkpoint.reader import read_into
from flextrain.checkpoint.retention import Keep
from flextrain.checkpoint.shards import (
    State,
    allocate_optimizer_state,
    boxes_to_write,
    model_state,
    optimizer_state,
)
from flextrain.checkpoint.snapshot import Snapshots, layout_of
from flextrain.checkpoint.together import agree, all_or_none, own_rank
from flextrain.checkpoint.writer import Request, Saved, Writer
from flextrain.errors import CheckpointCorrupt, CheckpointError
from flextrain.log import get_logger

log = get_logger(__name__)
SLOTS = 2  # snapshots in flight; a third waits
COMMIT_TIMEOUT_S = 600.0
DEFAULT_KEEP = Keep(last_n=3)


class CheckpointSaver:
    """Checkpoints of one model and optimizer below a catalog. Called by all ranks together, between two steps."""

    def __init__(
        self,
        catalog: Catalog,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        keep: Keep = DEFAULT_KEEP,
        commit_timeout_s: float = COMMIT_TIMEOUT_S,
    ) -> None:
        self.catalog, self._model, self._optimizer, self.keep = catalog, model, optimizer, keep
        self._commit_timeout_s = commit_timeout_s
        self._writer: Writer | None = None
        self._unsent: Request | None = None

    def prepare(self) -> None:
        """Allocate and touch the shared memory and start the writer, so that the first save is as fast as any other."""
        if self._writer is None:
            all_or_none(self._start)
            self._free, self._gang, self._count = list(range(SLOTS)), agree(lambda: uuid.uuid4().hex), 0

    def _start(self) -> None:
        allocate_optimizer_state(self._model, self._optimizer)
        boxes = boxes_to_write(self._tensors())
        arena = Arena.create(layout_of(boxes), SLOTS)
        self._snapshots, self._writer = Snapshots(arena, boxes), Writer(arena)

    def snapshot(self, step: int, state: dict[str, Any]) -> list[Saved]:
        """Copy the state as it is and have it made durable and committed as `step`; returns what was done meanwhile.

        `state` is JSON: what the tensors do not say (position, seeds, config). Where both slots are still being written
        it waits for the older one: memory never grows. Raises the error of a save that failed.
        """
        self.keep.check(state)
        self.prepare()
        assert self._writer
        done: list[Saved] = []
        while not self._free:
            done += self.poll(timeout_s=1.0)
        slot = self._free.pop(0)
        self._snapshots.take(slot)
        self._count += 1
        self._unsent = Request(
            root=self.catalog.store.url,
            slot=slot,
            step=step,
            attempt=f"{self._gang}-{self._count}",
            rank=own_rank(),
            world_size=dist.get_world_size() if dist.is_initialized() else 1,
            keep=self.keep,
            timeout_s=self._commit_timeout_s,
            state=state,
        )
        return done + self.poll()

    def hold(self) -> None:
        """Before the optimizer changes the weights: let a copy that a GPU is still making come first."""
        if self._unsent:
            self._snapshots.hold()

    def poll(self, timeout_s: float = 0.0) -> list[Saved]:
        """Saves committed since the last call, waiting up to `timeout_s` for one.

        Raises the error of a save that failed; what was committed before stays as it is.
        """
        self._send()
        done: list[Saved] = []
        while self._writer and (saved := self._writer.poll(0.0 if done else timeout_s)):
            self._free.append(saved.slot)
            if saved.error:
                raise saved.error
            done.append(saved)
        return done

    def wait(self) -> list[Saved]:
        """Every save under way, committed. Raises the error of one that failed."""
        done: list[Saved] = []
        while self._writer and (self._unsent or self._writer.pending):
            done += self.poll(timeout_s=1.0)
        return done

    def _send(self) -> None:
        """Hand a snapshot to the writer once its copy is complete."""
        if self._unsent and self._writer and self._snapshots.settled():
            self._writer.submit(self._unsent)
            self._unsent = None

    def save(self, step: int, state: dict[str, Any]) -> Manifest:
        """Snapshot and wait for the commit; returns the manifest."""
        self.snapshot(step, state)
        self.wait()
        return self.catalog.manifest(step)

    def close(self) -> None:
        """End the writer; what it has not committed is lost."""
        if self._writer:
            self._writer.close()
            self._writer = None

    def resume(self) -> Manifest | None:
        """Load the newest sound checkpoint into model and optimizer; None where there is none.

        One found corrupt is set aside with a warning (its manifest is renamed, its data stay for the next retention),
        and the next older one is tried. Raises CheckpointMismatch where it belongs to another model.
        """
        gone = None
        while (step := agree(lambda: max(self.catalog.steps(), default=None))) is not None:
            try:
                return self.load(self.catalog, step)
            except CheckpointCorrupt as error:
                log.warning("checkpoint of step %d is unsound and set aside: %s", step, error)
                agree(partial(self.catalog.set_aside, step))
            except CheckpointError as error:
                if error.number != 4 or step == gone:  # else retired since it was listed: a newer one is there
                    raise
                gone = step
        return None

    def resume_from(self, url: str) -> tuple[Manifest, str]:
        """Load the checkpoint at `url`, or the newest sound one before it in the same place; returns its URL too.

        Nothing is set aside: the place is another run's. Raises CheckpointCorrupt where none is sound.
        """
        catalog, last = Catalog.locate(url)
        steps = [step for step in agree(catalog.steps) if step <= last] or [last]
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
            allocate_optimizer_state(self._model, self._optimizer)
            read_into(catalog.folder(step), manifest, self._tensors())
            return manifest

        manifest: Manifest = all_or_none(read)[0]
        return manifest

    def _tensors(self) -> State:
        return model_state(self._model) | optimizer_state(self._model, self._optimizer)
