"""Learning rate and gradient accumulation for training loops of one's own whose number of ranks changes.

DistributedTrainer needs neither: it keeps the global batch exactly as it is, whatever the world size, and with it the
learning rate. Whoever lets the global batch change scales the rate (`LRScalingManager`); whoever keeps it accumulates
more micro-batches (`GradientAccumulationManager`). Both together would correct for one change twice.
"""

import math
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from flextrain.errors import ConfigError
from flextrain.log import get_logger

log = get_logger(__name__)


class ScalingRule(StrEnum):
    """How the learning rate follows the global batch: in proportion (Goyal et al. 2017, arXiv:1706.02677), by its
    square root (Krizhevsky 2014, arXiv:1404.5997), or not at all."""

    LINEAR = "linear"
    SQRT = "sqrt"
    NONE = "none"

    def factor(self, batch_ratio: float) -> float:
        """What the rate is multiplied by where the batch is multiplied by `batch_ratio`."""
        return {"linear": batch_ratio, "sqrt": math.sqrt(batch_ratio), "none": 1.0}[self.value]


@dataclass(frozen=True)
class ScalingConfig:
    """`base_lr` is the peak rate for `base_world_size` ranks of `base_batch_size` sequences each; a change of the rate
    is spread over `warmup_steps` optimizer steps."""

    base_lr: float
    base_batch_size: int
    base_world_size: int
    scaling_rule: ScalingRule = ScalingRule.LINEAR
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if self.scaling_rule not in list(ScalingRule):
            known = ", ".join(ScalingRule)
            raise ConfigError(f"scaling_rule is {self.scaling_rule!r}; expected one of {known}", number=40)
        object.__setattr__(self, "scaling_rule", ScalingRule(self.scaling_rule))
        _check_positive(self, "base_lr", "base_batch_size", "base_world_size")
        if self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps is {self.warmup_steps}; expected 0 or more", number=40)


class Optimizer(Protocol):
    """What any torch.optim.Optimizer has."""

    @property
    def param_groups(self) -> Sequence[MutableMapping[str, Any]]: ...


class LRScalingManager:
    """Sets the optimizer's learning rate to fit the global batch. Each rank keeps its batch size.

    Groups whose rates differ keep their proportions.
    """

    def __init__(self, config: ScalingConfig, optimizer: Optimizer) -> None:
        self.config, self._groups = config, optimizer.param_groups
        self._proportions = [group["lr"] / config.base_lr for group in self._groups]
        self._from = self._target = self._now = config.base_lr
        self._steps = config.warmup_steps

    @property
    def lr(self) -> float:
        """The rate of the next step, of a group whose rate was `base_lr`."""
        return self._now

    def on_topology_change(self, new_world_size: int, batch_size: int | None = None) -> float:
        """Aim for the rate that fits `new_world_size` ranks of `batch_size` (default: as before) sequences; returns it.

        Without warm-up it holds from the next step on.
        """
        config = self.config
        if new_world_size < 1:
            raise ConfigError(f"the new world size is {new_world_size}; expected 1 or more", number=40)
        before = config.base_batch_size * config.base_world_size
        ratio = (batch_size or config.base_batch_size) * new_world_size / before
        self._from, self._target, self._steps = self._now, config.base_lr * config.scaling_rule.factor(ratio), 0
        self._set()
        return self._target

    def step_warmup(self) -> float:
        """Call after every optimizer step; returns the rate of the next one, on a line from the old rate to the new."""
        self._steps = min(self._steps + 1, self.config.warmup_steps)
        self._set()
        return self._now

    def _set(self) -> None:
        done = self._steps / self.config.warmup_steps if self.config.warmup_steps else 1.0
        self._now = self._target if done == 1.0 else self._from + (self._target - self._from) * done
        for group, proportion in zip(self._groups, self._proportions, strict=True):
            group["lr"] = self._now * proportion


@dataclass(frozen=True)
class GradAccumulationConfig:
    """`local_batch_size` sequences per rank and micro-batch; `target_global_batch_size` per optimizer step."""

    target_global_batch_size: int
    local_batch_size: int
    base_world_size: int

    def __post_init__(self) -> None:
        _check_positive(self, "target_global_batch_size", "local_batch_size", "base_world_size")


class GradientAccumulationManager:
    """Says how many micro-batches each rank accumulates so that the global batch stays at its target.

    Equal micro-batches hit the target only where it divides; `effective_global_batch_size` says what comes out, never
    less than the target, and a warning does where it is more.
    """

    def __init__(self, config: GradAccumulationConfig) -> None:
        self.config = config
        self._seen = 0
        self.on_topology_change(config.base_world_size)

    def on_topology_change(self, new_world_size: int) -> int:
        """Fit the accumulation to `new_world_size` ranks; returns the micro-batches per optimizer step. A step that was
        being accumulated begins anew."""
        if new_world_size < 1:
            raise ConfigError(f"the new world size is {new_world_size}; expected 1 or more", number=40)
        target, per_pass = self.config.target_global_batch_size, self.config.local_batch_size * new_world_size
        self.accumulation_steps = -(-target // per_pass)
        self.effective_global_batch_size = self.accumulation_steps * per_pass
        self._seen = 0
        if self.effective_global_batch_size != target:
            log.warning(
                "%d ranks of %d sequences make a global batch of %d instead of %d; DistributedTrainer keeps it exact",
                new_world_size,
                self.config.local_batch_size,
                self.effective_global_batch_size,
                target,
            )
        return self.accumulation_steps

    def should_step(self) -> bool:
        """Call after every backward pass: whether the optimizer is to step now."""
        self._seen = (self._seen + 1) % self.accumulation_steps
        return self._seen == 0


def _check_positive(config: object, *names: str) -> None:
    for name in names:
        if not getattr(config, name) > 0:
            raise ConfigError(f"{name} is {getattr(config, name)}; expected more than 0", number=40)
