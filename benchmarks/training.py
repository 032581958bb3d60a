"""A model of a given shape, trained on random tokens for a given number of steps, with a clock on every step."""

import contextlib
import io
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from flextrain.config import Config
from flextrain.model import build_model
from flextrain.train.hooks import Hook, Progress
from flextrain.train.step import StepResult
from flextrain.train.trainer import DistributedTrainer

WARMUP_STEPS = 3
UNCOUNTED_STEPS = WARMUP_STEPS + 1  # the last one ends in a checkpoint


@dataclass(frozen=True)
class Shape:
    """A GPT-2, and the sequences of a step."""

    layers: int
    width: int
    heads: int
    vocab_size: int
    seq_length: int
    batch_size: int

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_length

    def __str__(self) -> str:
        return f"{self.layers} layers of width {self.width}, steps of {self.batch_size} x {self.seq_length} tokens"


class RandomTokens(torch.utils.data.Dataset[Tensor]):
    """Sequences one token longer than the context, which is what the trainer shifts into inputs and labels."""

    def __init__(self, shape: Shape, samples: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, shape.vocab_size, (samples, shape.seq_length + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


@dataclass(frozen=True)
class Seconds:
    """By the clock on the wall, and of this process's own work: on a busy machine the second is the steadier one."""

    wall: float
    cpu: float

    def __sub__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.wall - other.wall, self.cpu - other.cpu)


class StepClock(Hook):
    """Wall and CPU seconds of every step. The device is waited for: a step counts when it is done."""

    def __init__(self) -> None:
        self.seconds: list[Seconds] = []
        self._last = Seconds(0.0, 0.0)

    def begin(self, progress: Progress | None = None) -> None:
        self._last = now()

    def after_step(self, progress: Progress | None = None, result: StepResult | None = None) -> None:
        at = now()
        self.seconds.append(at - self._last)
        self._last = at

    def median(self) -> Seconds:
        return median_seconds(counted(self.seconds))


def median_seconds(values: Sequence[Seconds]) -> Seconds:
    return Seconds(median(value.wall for value in values), median(value.cpu for value in values))


def counted(seconds: Sequence[Seconds]) -> Sequence[Seconds]:
    """Without the first steps, which warm up, and without the last, which ends in a checkpoint."""
    return seconds[WARMUP_STEPS:-1]


def now() -> Seconds:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return Seconds(time.perf_counter(), time.process_time())


def device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def configure(shape: Shape, folder: str, steps: int, *, name: str = "gpt", compiled: bool = False) -> Config:
    model = {
        "preset": "gpt2-124m",
        "name": name,
        "vocab_size": shape.vocab_size,
        "d_model": shape.width,
        "num_layers": shape.layers,
        "num_heads": shape.heads,
        "d_ff": 4 * shape.width,
    }
    training = {
        "batch_size": shape.batch_size,
        "learning_rate": 1e-3,
        "min_learning_rate_ratio": 1.0,
        "warmup_steps": 0,
        "max_steps": steps,
        "compile": compiled,
    }
    return Config.model_validate(
        {
            "main": {"output_dir": folder},
            "data": {"seq_length": shape.seq_length},
            "model": model,
            "training": training,
            "checkpoint": {"interval": steps, "auto_resume": False},
        }
    )


def make_model(config: Config, seed: int | None = 0) -> nn.Module:
    vocab_size, seq_length = config.model.vocab_size, config.data.seq_length
    assert vocab_size is not None
    return build_model(config.model, vocab_size=vocab_size, seq_length=seq_length, seed=seed)


def train(config: Config, model: nn.Module, samples: RandomTokens, clock: StepClock) -> None:
    with contextlib.redirect_stdout(io.StringIO()):  # its progress lines are printed and paid for, but not shown
        DistributedTrainer(model, config, samples, hooks=[clock]).train()
