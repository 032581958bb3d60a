"""Committed checkpoints in milliseconds: what the writer process does, done in this one."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from flextrain.checkpoint.arena import Arena
from flextrain.checkpoint.catalog import Catalog
from flextrain.checkpoint.requests import Request
from flextrain.checkpoint.retention import Keep
from flextrain.checkpoint.shards import allocate_optimizer_state, boxes_to_write, model_state, optimizer_state
from flextrain.checkpoint.snapshot import Snapshots, layout_of
from flextrain.checkpoint.together import own_rank, world_size
from flextrain.checkpoint.writer import save
from flextrain.storage import open_store

KEEP_ALL = Keep(last_n=10**6)


def save_now(root: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, state: Any) -> str:
    """Commit model and optimizer as `step` below `root`, by all ranks there are; returns the checkpoint's URL."""
    allocate_optimizer_state(model, optimizer)
    boxes = boxes_to_write(model_state(model) | optimizer_state(model, optimizer))
    arena = Arena.create(layout_of(boxes), slots=1)
    Snapshots(arena, boxes).take(0)
    save(Request(str(root), 0, step, f"attempt-{step}", own_rank(), world_size(), KEEP_ALL, 20.0, state), arena)
    arena.close()
    return Catalog(open_store(root)).url_of(step)
