"""Saving with all ranks: a save is a copy between two steps, and a process beside does the rest."""

import uuid
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from flextrain.checkpoint.arena import Arena
from flextrain.checkpoint.catalog import Catalog
from flextrain.checkpoint.generation import claim
from flextrain.checkpoint.manifest import Manifest
from flextrain.checkpoint.recovery import Recovery
from flextrain.checkpoint.requests import Request, Saved, Writer
from flextrain.checkpoint.retention import Keep
from flextrain.checkpoint.shards import (
    State,
    allocate_optimizer_state,
    boxes_to_write,
    model_state,
    optimizer_state,
)
from flextrain.checkpoint.snapshot import Snapshots, layout_of
from flextrain.checkpoint.staging import Staging
from flextrain.checkpoint.tiers import STRAIGHT, CheckpointTier, Route
from flextrain.checkpoint.together import agree, all_or_none, most, own_rank, world_size
from flextrain.errors import CheckpointError, FlextrainError

SLOTS = 2  # snapshots in flight; a third waits
COMMIT_TIMEOUT_S = 600.0
ASK_S = 1.0  # between the questions that waiting ranks ask each other
READY, WAITING, FAILED = range(3)
DEFAULT_KEEP = Keep(last_n=3)


class Saver:
    """Checkpoints of one state below a catalog. Called by all ranks together, between two steps.

    `tensors()` is the state to save and to load into; its names, shapes and dtypes never change. An `arena` that an
    earlier saver of the same state had is gone on with, and so are the snapshots in it.
    """

    held = False  # whether `hold` is called before the tensors change; else training waits for copies from a GPU

    def __init__(
        self,
        catalog: Catalog,
        tensors: Callable[[], State],
        keep: Keep = DEFAULT_KEEP,
        commit_timeout_s: float = COMMIT_TIMEOUT_S,
        route: Route = STRAIGHT,
        arena: Arena | None = None,
    ) -> None:
        self.catalog, self.keep, self.arena, self.route = catalog, keep, arena, route
        self._tensors, self._commit_timeout_s = tensors, commit_timeout_s
        self._staging = Staging(route.nvme) if route.nvme else None
        self._snapshots: Snapshots | None = None
        self._writer: Writer | None = None
        self._unsent: tuple[Request, CheckpointTier] | None = None
        self._disowned: set[str] = (
            set()
        )  # attempts that failed elsewhere: what the writer still says of them is no news
        self._busy: dict[str, int] = {}  # slots that the writer reads, by attempt
        self._gang: str | None = None  # begins the names of this saver's attempts

    def prepare(self) -> None:
        """Allocate and touch the shared memory and start the writer, so that the first save is as fast as any other."""
        if self._writer is None:
            self.claim()
            all_or_none(self._start)

    def claim(self) -> None:
        """Take the place over: no saver that claimed it before can commit there any more. `prepare` does it; before a
        resumption it keeps others from committing what that would miss. Raises StorageError where it cannot be written.
        """
        if self._gang is None:
            self._gang, self._count = agree(lambda: claim(self.catalog.store, uuid.uuid4().hex)), 0

    def _start(self) -> None:
        self._snapshots = self._snapshots or self._bind()
        assert self.arena
        self._writer, self._busy = Writer(self.arena), {}

    def _bind(self) -> Snapshots:
        """Snapshots of the state as its tensors are now; an arena that was laid out for another one is given up."""
        boxes = boxes_to_write(self._tensors())
        layout = layout_of(boxes)
        if self.arena is None or self.arena.layout != layout:
            self.arena = Arena.create(layout, SLOTS)
        return Snapshots(self.arena, boxes, self._changing())

    def _changing(self) -> set[str]:
        """Names of tensors that change even before `hold` is called."""
        return set()

    def follow(self, state: State) -> bool:
        """Save these tensors from now on; returns whether they are laid out as those before, else nothing changes."""
        boxes = boxes_to_write(state)
        if not all(all_or_none(lambda: self.arena is None or layout_of(boxes) == self.arena.layout)):
            return False
        self._tensors = lambda: state
        if self._snapshots:
            self._snapshots.watch(boxes, self._changing())
        return True

    def snapshot(self, step: int, state: dict[str, Any], tier: CheckpointTier = CheckpointTier.S3) -> list[Saved]:
        """Copy the tensors as they are and have them brought to `tier` as `step`; returns what was committed meanwhile.

        `state` is JSON: what the tensors do not say (position, seeds, config). MEMORY leaves the copy where it is; NVME
        stages it on this node's disk; S3 commits it in the catalog. Where both slots are still being written it waits
        for the older one: memory never grows. Raises the error of a save that failed.
        """
        self.keep.check(state)
        if tier is CheckpointTier.NVME and not self.route.nvme:
            raise CheckpointError("there is no disk to save to", number=43, remedy="set checkpoint.nvme_path")
        self.prepare()
        self._settle()
        done = self._until_all(lambda: self._free_slot() is not None)
        slot = self._free_slot()
        assert slot is not None
        self._count += 1
        request = Request(
            root=self.catalog.store.url,
            slot=slot,
            step=step,
            attempt=f"{self._gang}-{self._count}",
            rank=own_rank(),
            world_size=world_size(),
            keep=self.keep,
            timeout_s=self._commit_timeout_s,
            state=state,
            route=self.route,
            nvme_only=tier is CheckpointTier.NVME,
        )
        assert self.arena
        assert self._snapshots
        self.arena.put_label(slot, None)
        self._snapshots.take(slot)
        if not self.held:
            self._snapshots.wait()
        self._unsent = request, tier
        self._send()
        return done

    def _settle(self) -> None:
        """Let the copy before this one be complete, and on its way."""
        if self._unsent and self._snapshots:
            self._snapshots.wait()
        self._send()

    def _free_slot(self) -> int | None:
        """A slot that nobody reads: the one with the older snapshot, so that the newest whole one is never lost."""
        assert self.arena
        labels = [self.arena.label(slot) for slot in range(SLOTS)]
        free = [slot for slot in range(SLOTS) if slot not in self._busy.values()]
        return min(free, key=lambda slot: (labels[slot] or {"step": -1})["step"], default=None)

    def hold(self) -> None:
        """Before the optimizer changes the weights: let a copy that a GPU is still making come first."""
        if self._unsent and self._snapshots:
            self._snapshots.hold()

    def poll(self, timeout_s: float = 0.0) -> list[Saved]:
        """Saves committed since the last call, waiting up to `timeout_s` for word from the writer.

        Raises the error of a save that failed; what was committed before stays as it is.
        """
        self._send()
        done: list[Saved] = []
        while self._writer and (saved := self._writer.poll(timeout_s)):
            timeout_s = 0.0
            self._busy.pop(saved.attempt, None)
            if saved.error and saved.attempt not in self._disowned:
                raise saved.error
            if not saved.staged and not saved.error:
                done.append(saved)
        return done

    def wait(self) -> list[Saved]:
        """Every save under way, where it was to go. Raises the error of one that failed."""
        self._settle()
        return self._until_all(lambda: not (self._writer and self._writer.pending))

    def _until_all(self, ready: Callable[[], bool]) -> list[Saved]:
        """Poll until every rank is ready. They ask each other meanwhile: what ails one of them, or that it is gone,
        ends the wait on all, long before the commit's timeout."""
        done: list[Saved] = []
        while True:
            error: FlextrainError | None = None
            try:
                done += self.poll(0.0 if ready() else ASK_S)
            except FlextrainError as caught:
                error = caught
            worst = most(FAILED if error else READY if ready() else WAITING)
            if error:
                raise error
            if worst == FAILED:
                self._disowned.update(self._writer.unanswered if self._writer else ())
                raise CheckpointError(
                    "a save failed on another rank",
                    number=14,
                    remedy="that rank's own message tells why; what was committed before is unharmed",
                )
            if worst == READY:
                return done

    def _send(self) -> None:
        """Label a snapshot once its copy is complete, and hand it to the writer."""
        if not (self._unsent and self._writer and self._snapshots and self._snapshots.settled()):
            return
        (request, tier), self._unsent = self._unsent, None
        assert self.arena
        facts = {"step": request.step, "attempt": request.attempt, "world_size": request.world_size}
        self.arena.put_label(request.slot, {**facts, "state": request.state})
        if tier is not CheckpointTier.MEMORY:
            self._busy[request.attempt] = request.slot
            self._writer.submit(request)

    def save(self, step: int, state: dict[str, Any]) -> Manifest:
        """Snapshot and wait for the commit; returns the manifest."""
        self.snapshot(step, state)
        self.wait()
        return self.catalog.manifest(step)

    def close(self) -> None:
        """End the writer; what it has not committed is lost. Snapshots in memory stay as long as this object."""
        if self._writer:
            self._writer.close()
            self._writer = self._gang = None

    def resume(self) -> Manifest | None:
        """Load the newest sound state of memory, node's disk and store; None where there is none. See `Recovery`."""
        return self._recovery().resume()

    def resume_from(self, url: str) -> tuple[Manifest, str]:
        """Load the checkpoint at `url`, or the newest sound one before it in the same place; returns its URL too."""
        return self._recovery().resume_from(url)

    def load(self, catalog: Catalog, step: int) -> Manifest:
        """Load one checkpoint of any catalog; no older one is tried. Raises CheckpointError on every rank."""
        return self._recovery().load(catalog, step)

    def _recovery(self) -> Recovery:
        return Recovery(self.catalog, lambda _: self._tensors(), self._staging, self.arena)


class CheckpointSaver(Saver):
    """Checkpoints of one model and optimizer. Where they are on a GPU, call `hold` before the optimizer's update."""

    held = True

    def __init__(
        self,
        catalog: Catalog,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        keep: Keep = DEFAULT_KEEP,
        commit_timeout_s: float = COMMIT_TIMEOUT_S,
        route: Route = STRAIGHT,
        arena: Arena | None = None,
    ) -> None:
        def tensors() -> State:
            allocate_optimizer_state(model, optimizer)
            return model_state(model) | optimizer_state(model, optimizer)

        super().__init__(catalog, tensors, keep, commit_timeout_s, route, arena)
        self._buffers = {f"model.{name}" for name, _ in model.named_buffers()}

    def _changing(self) -> set[str]:
        return self._buffers  # forward writes to them: running means, counters
