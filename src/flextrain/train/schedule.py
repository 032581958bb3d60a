"""The learning rate as a pure function of the step."""

import math

from flextrain.config.schema import TrainingConfig


def learning_rate(step: int, last_step: int, config: TrainingConfig) -> float:
    """Rate of optimizer step `step`, counted from 0: linear warm-up, then half a cosine down to the minimum ratio."""
    peak = config.learning_rate
    warmup = min(config.warmup_steps, last_step)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, last_step - 1 - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return peak * (config.min_learning_rate_ratio + (1 - config.min_learning_rate_ratio) * cosine)
