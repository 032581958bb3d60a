"""A tiny model and corpus, and a trainer over them, for tests of training."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flextrain.config import Config
from flextrain.elastic.place import RunPlace
from flextrain.model import build_model
from flextrain.train.hooks import Hook, Progress
from flextrain.train.step import StepResult
from flextrain.train.trainer import DistributedTrainer

VOCAB, SEQ_LENGTH = 61, 12


class Sequences(torch.utils.data.Dataset[torch.Tensor]):
    """Token tensors of unequal length, so that padding and token weights matter."""

    def __init__(self, count: int = 257) -> None:
        generator = torch.Generator().manual_seed(7)
        lengths = torch.randint(3, SEQ_LENGTH + 2, (count,), generator=generator).tolist()
        self._items = [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._items[index]


class Recorder(Hook):
    """Keeps every step's loss and sample ids, and stops training after `stop_after` by raising Stopped."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.rows: list[tuple[int, float, list[int]]] = []
        self._stop_after = stop_after

    def after_step(self, progress: Progress, result: StepResult) -> None:
        self.rows.append((progress.step, float(result.loss_sum) / result.tokens, result.sample_ids.tolist()))
        if progress.step == self._stop_after:
            raise Stopped


class Stopped(Exception):
    pass


def tiny_config(**sections: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "main": {},
        "data": {"seq_length": SEQ_LENGTH},
        "model": {"vocab_size": VOCAB, "d_model": 16, "num_layers": 2, "num_heads": 2, "d_ff": 32},
        "training": {"global_batch_size": 10, "batch_size": 3, "max_steps": 100, "warmup_steps": 5},
        "checkpoint": {"interval": 25},
    }
    return Config.model_validate({key: base.get(key, {}) | sections.get(key, {}) for key in base | sections})


def train_tiny(root: Path | str, config: Config, hooks: Sequence[Hook]) -> dict[str, Any] | None:
    """Train with this process's world below `root`; None where a hook stopped it."""
    model = build_model(config.model, vocab_size=VOCAB, seq_length=SEQ_LENGTH, seed=0)
    place = RunPlace(root=str(root), events=f"{root}/events", run_id="tiny")
    trainer = DistributedTrainer(model, config, Sequences(), hooks=hooks, place=place)
    try:
        return trainer.train()
    except Stopped:
        return None
