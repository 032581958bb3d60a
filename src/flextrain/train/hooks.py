"""What happens around steps: recording, printing, checkpointing, accounting. The loop knows none of it."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flextrain.checkpoint.manifest import Manifest
from flextrain.checkpoint.requests import Saved
from flextrain.checkpoint.saver import CheckpointSaver
from flextrain.checkpoint.tiers import CheckpointTier
from flextrain.config.schema import CheckpointConfig
from flextrain.errors import ModelError
from flextrain.tracking import Tracker, names
from flextrain.train.step import StepResult
from flextrain.units import format_count, format_seconds


@dataclass
class Progress:
    """Where training stands: `step` optimizer steps are done of `last_step`; `tokens` were predicted in all."""

    step: int
    last_step: int
    tokens: int = 0
    loss: float = float("nan")
    checkpoint: dict[str, Any] = field(default_factory=dict)

    def advance(self, result: StepResult) -> None:
        self.step += 1
        self.tokens += result.tokens

    @property
    def is_last(self) -> bool:
        return self.step >= self.last_step


class Hook:
    """Base of all hooks; override what is needed. Every rank calls every hook, in the same order."""

    def begin(self, progress: Progress) -> None:
        """Before the first step, after any checkpoint was loaded."""

    def after_step(self, progress: Progress, result: StepResult) -> None:
        """After optimizer step `progress.step` is done."""

    def end(self, progress: Progress, error: BaseException | None) -> None:
        """After the last step, or with the error that stops training."""


class MetricsHook(Hook):
    """Gives every step's metrics to the tracker. Values stay on the device until a batch of steps is read at once, so
    that a GPU never waits for its log; on the CPU, where reading is free, each step is written as it ends."""

    def __init__(self, tracker: Tracker, interval: int) -> None:
        self._tracker, self._interval = tracker, interval
        self._pending: list[tuple[int, StepResult, float]] = []
        self._last_s = 0.0

    def begin(self, progress: Progress) -> None:
        self._last_s = time.perf_counter()

    def after_step(self, progress: Progress, result: StepResult) -> None:
        now_s = time.perf_counter()
        self._pending.append((progress.step, result, now_s - self._last_s))
        self._last_s = now_s
        if result.loss_sum.device.type == "cpu" or len(self._pending) >= self._interval or progress.is_last:
            self.flush(progress)

    def end(self, progress: Progress, error: BaseException | None) -> None:
        if error is None:
            self.flush(progress)

    def flush(self, progress: Progress) -> None:
        """Read and hand on what has gathered; called before every checkpoint, so that no committed step is lost."""
        if not self._pending:
            return
        values: list[Tensor] = [
            value.double() for _, result, _ in self._pending for value in (result.loss_sum, result.grad_norm)
        ]
        numbers = torch.stack(values).tolist()
        for (step, result, seconds), loss_sum, norm in zip(self._pending, numbers[::2], numbers[1::2], strict=True):
            metrics = {
                names.LOSS: loss_sum / max(1, result.tokens),
                names.GRAD_NORM: norm,
                names.LEARNING_RATE: result.learning_rate,
                names.TOKENS: float(result.tokens),
                names.STEP_SECONDS: seconds,
                names.TOKENS_PER_SECOND: result.tokens / max(seconds, 1e-9),
            }
            progress.loss = metrics[names.LOSS]
            self._tracker.log(step, metrics)
            if not math.isfinite(progress.loss):
                raise ModelError(
                    f"the loss of step {step} is {progress.loss}: training has diverged",
                    number=20,
                    remedy="lower training.learning_rate or lengthen training.warmup_steps; no such state was saved",
                )
        self._pending.clear()


class SamplesHook(Hook):
    """Records which samples this rank took, for `flextrain audit`; before a checkpoint, so that no committed step lacks
    its record."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def after_step(self, progress: Progress, result: StepResult) -> None:
        self._tracker.event(names.SAMPLES, step=progress.step, ids=result.sample_ids.tolist())


class StateHook(Hook):
    """Tells the ledger what the node is doing: replaying steps an earlier attempt had done, then useful, then idle."""

    def __init__(self, tracker: Tracker, replay_until: int) -> None:
        self._tracker, self._replay_until, self._state = tracker, replay_until, "restart"

    def begin(self, progress: Progress) -> None:
        self._enter("replay" if progress.step < self._replay_until else "useful")

    def after_step(self, progress: Progress, result: StepResult) -> None:
        if progress.step == self._replay_until:
            self._enter("useful")

    def end(self, progress: Progress, error: BaseException | None) -> None:
        self._enter("idle")

    @contextmanager
    def during(self, state: str) -> Iterator[None]:
        """Count the time inside as `state`, and go on with the present one after it."""
        before = self._state
        self._enter(state)
        yield
        self._enter(before)

    def _enter(self, state: str) -> None:
        if state != self._state:
            self._tracker.event(names.STATE, state=state)
        self._state = state


class CheckpointHook(Hook):
    """Saves as `settings` say and at the end. `facts(progress)` is what the manifest records besides tensors.

    Training stands still for the copy alone; without `settings.async_save` it waits for every commit, else for the last
    one. A state that was `rescued` from memory or a node's disk, and is not in the store, is brought there first.
    """

    def __init__(
        self,
        saver: CheckpointSaver,
        settings: CheckpointConfig,
        facts: Callable[[Progress], dict[str, Any]],
        tracker: Tracker,
        metrics: MetricsHook,
        states: StateHook,
        rescued: Manifest | None = None,
    ) -> None:
        self._saver, self._settings, self._facts, self._rescued = saver, settings, facts, rescued
        self._tracker, self._metrics, self._states = tracker, metrics, states

    def begin(self, progress: Progress) -> None:
        self._saver.keep.check(self._facts(progress))
        self._saver.prepare()
        if self._rescued:
            self._save(progress, self._rescued.state)

    def after_step(self, progress: Progress, result: StepResult) -> None:
        self._note(progress, self._saver.poll())
        if progress.is_last or progress.step % self._settings.interval == 0:
            self._metrics.flush(progress)
            self._save(progress, self._facts(progress))
        elif (often := self._settings.memory_snapshot_interval) and progress.step % often == 0:
            self._metrics.flush(progress)
            with self._states.during(names.State.CHECKPOINT):
                self._note(progress, self._saver.snapshot(progress.step, self._facts(progress), CheckpointTier.MEMORY))

    def _save(self, progress: Progress, facts: dict[str, Any]) -> None:
        with self._states.during(names.State.CHECKPOINT):
            self._note(progress, self._saver.snapshot(progress.step, facts))
            if progress.is_last or not self._settings.async_save:
                self._note(progress, self._saver.wait())

    def end(self, progress: Progress, error: BaseException | None) -> None:
        self._saver.close()

    def _note(self, progress: Progress, done: list[Saved]) -> None:
        for saved in done:
            url = self._saver.catalog.url_of(saved.step)
            progress.checkpoint = {"url": url, "step": saved.step, "digest": saved.digest}
            facts = {"url": url, "size_bytes": saved.size_bytes, "seconds": saved.seconds}
            self._tracker.event(names.CHECKPOINT, step=saved.step, **facts)


class ConsoleHook(Hook):
    """Prints a line at the first step and then every `interval`: step, loss, rate, speed and time left."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._began, self._read = (0.0, 0, 0), True

    def begin(self, progress: Progress) -> None:
        self._began = (time.perf_counter(), progress.step, progress.tokens)

    def after_step(self, progress: Progress, result: StepResult) -> None:
        began_s, first_step, first_tokens = self._began
        if not self._read:
            return
        if progress.step != first_step + 1 and progress.step % self._interval and not progress.is_last:
            return
        loss = float(result.loss_sum) / max(1, result.tokens)
        seconds = max(1e-9, time.perf_counter() - began_s)
        left_s = seconds / (progress.step - first_step) * (progress.last_step - progress.step)
        speed = format_count((progress.tokens - first_tokens) / seconds)
        width = len(str(progress.last_step))
        where = f"step {progress.step:>{width}}/{progress.last_step}  {_bar(progress.step / progress.last_step)}"
        how = f"loss {loss:.4f}  lr {result.learning_rate:.2e}  {speed} tok/s  {format_seconds(left_s)} left"
        try:
            print(f"{where}  {how}", flush=True)
        except OSError:  # nobody reads any more, as in `flextrain train | head`
            self._read = False


def _bar(share: float, width: int = 20) -> str:
    full = round(share * width)
    return "█" * full + "░" * (width - full)
