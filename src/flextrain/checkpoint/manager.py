"""CheckpointManager: checkpoints of any state, on any tier, for those who write their own training loop."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from flextrain.checkpoint.catalog import Catalog
from flextrain.checkpoint.manifest import Manifest, TensorEntry
from flextrain.checkpoint.recovery import Recovery
from flextrain.checkpoint.retention import keep_of
from flextrain.checkpoint.saver import Saver
from flextrain.checkpoint.shards import State
from flextrain.checkpoint.staging import Staging
from flextrain.checkpoint.tiers import CheckpointTier, route_of
from flextrain.checkpoint.tree import Flattener, unflatten
from flextrain.config.schema import CheckpointConfig
from flextrain.errors import CheckpointError, CheckpointMismatch
from flextrain.storage import open_store

FOLDER = "checkpoints"  # where no storage is named
TREE = "flextrain.tree"  # beside the metrics, in a manifest's state


@dataclass
class CheckpointState:
    """What is saved and loaded: any nesting of dicts, lists and tuples with tensors, numbers, text and None in it.

    `model` is usually `model.state_dict()`, `optimizer` `optimizer.state_dict()`. `metrics` are numbers that
    checkpoints can be compared by (`checkpoint.keep_best_metric`).
    """

    step: int
    model: Any = None
    optimizer: Any = None
    metrics: dict[str, float] = field(default_factory=dict)
    extra: Any = None

    @classmethod
    def of(cls, state: "CheckpointState | Mapping[str, Any]") -> "CheckpointState":
        """Raises CheckpointError for keys that it does not know, or without a step."""
        if isinstance(state, CheckpointState):
            return state
        known = [one.name for one in fields(cls)]
        unknown = [key for key in state if key not in known]
        if unknown or "step" not in state:
            what = f"the key {unknown[0]!r}, which it does not know" if unknown else "no step"
            raise CheckpointError(
                f"a state to save has {what}", number=49, remedy=f"its keys are {', '.join(known)}; step is needed"
            )
        return cls(**state)

    def checked_metrics(self) -> dict[str, float]:
        """Raises CheckpointError for one that is no number of Python's."""
        for name, value in self.metrics.items():
            if not isinstance(value, int | float):
                raise CheckpointError(
                    f"metrics.{name} is a {type(value).__name__}", number=49, remedy="give a number: a tensor's .item()"
                )
        return self.metrics

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optimizer, "extra": self.extra}


class CheckpointManager:
    """Saves and loads states as `config` says; with several ranks, all call every method together.

    A save returns when the tensors are copied to shared memory; a process beside brings them to the tier asked for.

        with CheckpointManager(CheckpointConfig(interval=500, memory_snapshot_interval=50, storage="s3://b/run")) as m:
            start = m.load_checkpoint()
            for step in ...:
                m.save_checkpoint(CheckpointState(step, model.state_dict(), optimizer.state_dict()))
    """

    def __init__(self, config: CheckpointConfig | None = None) -> None:
        """Without `config.storage`, the store is the folder ./checkpoints. Raises StorageError, CheckpointError."""
        self.config = config or CheckpointConfig()
        self.catalog, self._route = Catalog(open_store(self.config.storage or FOLDER)), route_of(self.config)
        self._staging = Staging(self._route.nvme) if self._route.nvme else None
        self._saver: Saver | None = None

    def due(self, step: int) -> CheckpointTier | None:
        """How far the state of `step` is to be saved, by the intervals configured; None for not at all."""
        often = self.config.memory_snapshot_interval
        if step % self.config.interval == 0:
            return CheckpointTier.S3
        return CheckpointTier.MEMORY if often and step % often == 0 else None

    def save_checkpoint(
        self, state: CheckpointState | Mapping[str, Any], tier: CheckpointTier | None = None
    ) -> CheckpointTier | None:
        """Save to `tier`, or where `due` says; returns the tier. A mapping has the fields of CheckpointState as keys.

        Raises CheckpointError for a value that cannot be saved, and where a save before this one failed.
        """
        state = CheckpointState.of(state)
        tier = CheckpointTier(tier) if tier else self.due(state.step)
        if tier:
            flat = Flattener()
            tree = {name: flat.take(part, name) for name, part in state.parts().items()}
            self._saver_of(flat.state).snapshot(state.step, {**state.checked_metrics(), TREE: tree}, tier)
        return tier

    def load_checkpoint(self, into: CheckpointState | Mapping[str, Any] | None = None) -> CheckpointState | None:
        """The newest sound state, from memory, else the node's disk, else the store, shard by shard where it must; None
        where there is none.

        With `into`, its tensors are filled in place, which sharded ones (DTensor) need; else new ones are made, whole.
        Raises CheckpointMismatch where the tensors of `into` are others than those saved.
        """
        state: State = {}
        if into is not None:
            flat = Flattener()
            for name, part in CheckpointState.of(into).parts().items():
                flat.take(part, name)
            state = flat.state

        def tensors(saved: Mapping[str, TensorEntry]) -> State:
            if into is None:
                state.clear()
                state.update({name: _empty(entry) for name, entry in saved.items()})
            return state

        arena = self._saver.arena if self._saver else None
        manifest = Recovery(self.catalog, tensors, self._staging, arena).resume()
        return _restored(manifest, state, self.catalog.url_of(manifest.step)) if manifest else None

    def wait(self) -> None:
        """Until every save has reached its tier. Raises the error of one that failed."""
        if self._saver:
            self._saver.wait()

    def close(self) -> None:
        """Wait, and end the process that writes. Snapshots in memory are gone with this object."""
        if self._saver:
            try:
                self._saver.wait()
            finally:
                self._saver.close()

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.close()
        elif self._saver:  # the other ranks may be anywhere: nobody is waited for
            self._saver.close()

    def _saver_of(self, state: State) -> Saver:
        """The saver of the last state, if this one is laid out as that was; else a new one."""
        if self._saver and self._saver.follow(state):
            return self._saver
        self.close()
        self._saver = Saver(self.catalog, lambda: state, keep_of(self.config), route=self._route)
        return self._saver


def _empty(entry: TensorEntry) -> torch.Tensor:
    try:
        return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    except RuntimeError as error:  # what torch raises where memory lacks
        raise CheckpointError(
            f"there is no memory for a tensor of {list(entry.shape)}",
            number=48,
            remedy="load it `into` sharded tensors",
        ) from error


def _restored(manifest: Manifest, state: State, where: str) -> CheckpointState:
    facts = dict(manifest.state)
    if TREE not in facts:
        raise CheckpointMismatch(
            f"{where} was not saved by CheckpointManager",
            number=46,
            remedy="load it with DistributedTrainer, load_weights or FlextrainReader",
        )
    tree = facts.pop(TREE)
    model, optimizer, extra = (unflatten(tree.get(name), state, where) for name in ("model", "optim", "extra"))
    return CheckpointState(manifest.step, model, optimizer, facts, extra)
