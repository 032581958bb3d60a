"""The training loop. Everything that is not a step is a hook."""

from collections.abc import Sequence
from contextlib import ExitStack

from flextrain.data.loader import StepLoader
from flextrain.train.hooks import Hook, Progress
from flextrain.train.step import OptimizerStep


def run_loop(progress: Progress, loader: StepLoader, take_step: OptimizerStep, hooks: Sequence[Hook]) -> None:
    """Train from `progress.step` to `progress.last_step`. Hooks begin and act in order, and end in reverse order,
    also where a step or another hook raised."""
    with ExitStack() as stack:
        for hook in hooks:
            hook.begin(progress)
            stack.push(lambda kind, error, trace, hook=hook: hook.end(progress, error))
        while progress.step < progress.last_step:
            batch = loader.step(progress.step)
            result = take_step(batch, progress.step, loader.tokens_per_step)
            progress.advance(result)
            for hook in hooks:
                hook.after_step(progress, result)
