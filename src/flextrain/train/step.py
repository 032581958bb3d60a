"""One optimizer step: the micro-batches of this rank, the gradient of the whole global batch, clip, update.

Legend: B sequences, T tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from flextrain.config.schema import Config
from flextrain.data.loader import IGNORED, Micro, StepBatch
from flextrain.parallel import Parallelized
from flextrain.train.schedule import learning_rate

LossSum = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class StepResult:
    """What a step was. `loss_sum` and `grad_norm` are 0-d tensors still on the device: nobody has waited for them.
    `sample_ids` are those this rank consumed, in order."""

    loss_sum: Tensor
    grad_norm: Tensor
    tokens: int
    learning_rate: float
    sample_ids: NDArray[np.int64]


class OptimizerStep:
    """Called as `take(batch, step, tokens)`. Gradients are sums over tokens divided by the tokens of the global batch,
    so the update is the same however that was cut over ranks and micro-batches (torchtitan PR 2206: what else happens).
    """

    def __init__(
        self,
        parallel: Parallelized,
        optimizer: torch.optim.Optimizer,
        config: Config,
        last_step: int,
        loss_sum: LossSum,
        before_update: Callable[[], None] = lambda: None,
    ) -> None:
        self._parallel, self._optimizer, self._config = parallel, optimizer, config.training
        self._last_step, self._loss_sum, self._seed = last_step, loss_sum, config.main.seed
        self._before_update = before_update

    def __call__(self, batch: StepBatch, step: int, tokens: int | None) -> StepResult:
        """Take optimizer step `step`, from 0. `tokens` is the global count of predicted tokens; None asks the peers."""
        rate = learning_rate(step, self._last_step, self._config)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._reseed(step)
        tokens = tokens or _sum_over_ranks(batch.tokens)
        loss = self.accumulate(batch, tokens)
        norm = self._parallel.clip_gradients(self._config.grad_clip)
        self._before_update()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if dist.is_initialized():
            dist.all_reduce(loss)
        return StepResult(loss, norm, tokens, rate, batch.ids)

    def _reseed(self, step: int) -> None:
        """The generators themselves: torch.manual_seed formats a traceback on CPU builds, 60 µs a step."""
        seed = _mix(self._seed, step, dist.get_rank() if dist.is_initialized() else 0)
        torch.default_generator.manual_seed(seed)
        if self._parallel.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def accumulate(self, batch: StepBatch, tokens: int) -> Tensor:
        """Forward and backward of every micro-batch; returns this rank's summed loss, a float64 scalar."""
        total = torch.zeros((), dtype=torch.float64, device=self._parallel.device)
        for index, micro in enumerate(batch.micros):
            with self._parallel.accumulating(last=index == len(batch.micros) - 1):
                with self._parallel.compute():
                    loss = self._loss_sum(self._parallel.module, micro.input_ids_BT, micro.labels_BT)
                (loss / max(1, tokens)).backward()
            total += loss.detach()
        return total


def uncounted(batch: StepBatch) -> StepBatch:
    """The first micro-batch with no token counted: a pass over it has the real shapes and zero gradients."""
    micro = batch.micros[0]
    blank = Micro(micro.input_ids_BT, torch.full_like(micro.labels_BT, IGNORED), 0)
    return StepBatch([blank], 0, batch.ids[:0])


def _mix(*numbers: int) -> int:
    """A 63-bit seed that differs for every tuple (FNV-1a over the numbers)."""
    seed = 0xCBF29CE484222325
    for number in numbers:
        seed = ((seed ^ number) * 0x100000001B3) % 2**64
    return seed >> 1


def _sum_over_ranks(count: int) -> int:
    if not dist.is_initialized():
        return count
    total = torch.tensor(count)
    dist.all_reduce(total)
    return int(total)
