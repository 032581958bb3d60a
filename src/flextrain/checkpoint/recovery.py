"""Finding the newest state and loading it: from memory, from the disks of the nodes, from the store, shard by shard."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from flextrain.checkpoint.arena import Arena
from flextrain.checkpoint.catalog import Catalog
from flextrain.checkpoint.commit import Attempt, merge
from flextrain.checkpoint.exchange import read_together
from flextrain.checkpoint.manifest import Manifest, TensorEntry
from flextrain.checkpoint.parts import Part
from flextrain.checkpoint.reader import check_fits
from flextrain.checkpoint.shards import State, boxes_to_write, spread
from flextrain.checkpoint.snapshot import layout_of, slot_views
from flextrain.checkpoint.staging import Staged, Staging
from flextrain.checkpoint.tiers import CheckpointTier, Option, options
from flextrain.checkpoint.together import agree, all_or_none
from flextrain.errors import CheckpointCorrupt, CheckpointError
from flextrain.log import get_logger
from flextrain.storage import Store

log = get_logger(__name__)
BAD_DATA = 6  # number of the CheckpointCorrupt that is found while tensors are being filled


@dataclass(frozen=True)
class Recovery:
    """Loads a state into `tensors(what was saved)`. All ranks call every method together; it raises on all or none."""

    catalog: Catalog
    tensors: Callable[[Mapping[str, TensorEntry]], State]
    staging: Staging | None = None
    arena: Arena | None = None

    def resume(self) -> Manifest | None:
        """Load the newest sound state, of one step from the nearest tier; None where there is none.

        What is found unsound gives way to the next, with a warning. A checkpoint in the store is set aside then: its
        manifest is renamed, its data stay for the next retention. Raises CheckpointMismatch where it belongs to another
        model, and CheckpointCorrupt where nothing sound is left and what was unsound has spoilt the weights. The
        manifest returned is that of the store where it has one of this step, else it names no objects.
        """
        unsound: set[Option] = set()
        spoilt = False
        gone: Option | None = None
        while found := [option for option in self._options() if option not in unsound]:
            best = found[0]
            try:
                manifest = self._load(best)
                if best.tier is CheckpointTier.S3:
                    return manifest
                known = self._committed(manifest)
                if known.attempt == manifest.attempt:
                    return known
                return self.load(self.catalog, best.step)  # the run has saved this step a second time since
            except CheckpointCorrupt as error:
                log.warning("step %d on tier %s is unsound and passed over: %s", best.step, best.tier, error)
                unsound.add(best)
                spoilt |= error.number == BAD_DATA
                if best.tier is CheckpointTier.S3:
                    agree(partial(self.catalog.set_aside, best.step))
            except CheckpointError as error:
                if error.number != 4 or best == gone:  # else retired since it was listed: a newer one is there
                    raise
                gone = best
        if spoilt:
            raise nothing_sound(self.catalog.store.url)
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
        """Load one checkpoint of any catalog, what this node's disk has of it from there. Raises CheckpointError."""
        manifest: Manifest = agree(partial(catalog.manifest, step))
        self._read(self._places(catalog, step), manifest)
        return manifest

    def _options(self) -> list[Option]:
        mine = lambda: (list(self._held()), [(s.attempt, s.rank) for s in self._staged()])  # noqa: E731
        memory, staged = zip(*all_or_none(mine), strict=True)
        return options(memory, staged, agree(self.catalog.steps))

    def _load(self, option: Option) -> Manifest:
        if option.tier is CheckpointTier.MEMORY:
            return self._load_memory(option)
        if option.tier is CheckpointTier.NVME:
            return self._load_staged(option)
        return self.load(self.catalog, option.step)

    def _load_memory(self, option: Option) -> Manifest:
        """Copy this rank's part back, and give it to those who let this rank write it. Nothing here is hashed: these
        are the bytes that a commit would have hashed."""
        assert self.arena
        places, slot = self.arena.layout.places, self._held()[option.step, option.attempt]
        body = self.arena.label(slot)
        assert body
        mine = {place.name: TensorEntry(place.dtype, place.full_shape, ()) for place in places}
        saved: dict[str, TensorEntry] = {}
        for theirs in all_or_none(lambda: mine):
            saved |= theirs
        state: State = {}

        def copy() -> None:
            assert self.arena
            state.update(self.tensors(saved))
            check_fits(saved, state, f"the snapshot of step {option.step}")
            boxes = boxes_to_write(state)
            if layout_of(boxes) != self.arena.layout:
                raise CheckpointCorrupt(
                    "it is held in other shards than are asked for", number=47, remedy="load it from the store"
                )
            if boxes:
                torch._foreach_copy_([box.local for box in boxes], slot_views(self.arena, slot))

        all_or_none(copy)
        spread(state)
        return Manifest(body["step"], body["attempt"], body["world_size"], body["state"], {})

    def _load_staged(self, option: Option) -> Manifest:
        """The parts lie on the disks of several nodes: put together what their records say, and read what is wanted."""
        gathered = all_or_none(lambda: [s for s in self._staged() if s.attempt.name == option.attempt])
        parts = {staged.rank: staged for found in gathered for staged in found}
        ordered: list[Staged] = [parts[rank] for rank in sorted(parts)]

        staged = [one.part for one in ordered]
        manifest: Manifest = agree(lambda: _checked(ordered[0].attempt, ordered[0].state, staged))
        self._read(self._places(self.catalog, option.step), manifest)
        return manifest

    def _read(self, places: list[Store], manifest: Manifest) -> None:
        state: State = {}
        all_or_none(lambda: state.update(self.tensors(manifest.tensors)))
        read_together(places, manifest, state)

    def _committed(self, found: Manifest) -> Manifest:
        """What the store knows of a state that came from a nearer tier."""

        def known() -> Manifest | None:
            if found.step not in self.catalog.steps():
                return None
            try:
                return self.catalog.manifest(found.step)
            except CheckpointCorrupt as error:
                log.warning("checkpoint of step %d is unsound and set aside: %s", found.step, error)
                self.catalog.set_aside(found.step)
                return None

        manifest: Manifest = agree(known) or replace(found, tensors={}, objects={})
        return manifest

    def _places(self, catalog: Catalog, step: int) -> list[Store]:
        near = [self.staging.folder(step)] if self.staging else []
        return [*near, catalog.folder(step)]

    def _staged(self) -> list[Staged]:
        return self.staging.found() if self.staging else []

    def _held(self) -> dict[tuple[int, str], int]:
        """The slots of memory that hold a whole snapshot, by step and attempt."""
        labels = [(slot, self.arena.label(slot)) for slot in range(self.arena.slots)] if self.arena else []
        return {(label["step"], label["attempt"]): slot for slot, label in labels if label}


def nothing_sound(where: str) -> CheckpointCorrupt:
    """What a trainer hears whose weights are neither a sound checkpoint's nor those that training begins with."""
    return CheckpointCorrupt(
        f"{where} holds no sound checkpoint any more, and the weights are not what training begins with",
        number=13,
        remedy="look at the warnings above; started again, training begins at step 0",
    )


def _checked(attempt: Attempt, state: dict[str, Any], parts: list[Part]) -> Manifest:
    """One manifest of all parts, as strictly looked at as one that was read. Raises CheckpointCorrupt."""
    manifest = merge(attempt, state, parts)
    return Manifest.from_json(manifest.to_json(), f"the staged step {attempt.step}")
