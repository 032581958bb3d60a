"""Durable state: raw chunks with hashes, one manifest per step whose creation is the commit, any world size to any.

<root>/step-00000050/<attempt>/rank-00000.bin    immutable, written by every rank
<root>/step-00000050/manifest.json               created if absent: from then on the checkpoint exists
"""

from typing import TYPE_CHECKING, Any

from flextrain.checkpoint.catalog import Catalog, newest_checkpoint
from flextrain.checkpoint.retention import Keep
from flextrain.checkpoint.tiers import CheckpointTier
from flextrain.config.schema import CheckpointConfig

if TYPE_CHECKING:
    from flextrain.checkpoint.manager import CheckpointManager, CheckpointState
    from flextrain.checkpoint.reader import load_weights
    from flextrain.checkpoint.saver import CheckpointSaver

__all__ = [
    "Catalog",
    "CheckpointConfig",
    "CheckpointManager",
    "CheckpointSaver",
    "CheckpointState",
    "CheckpointTier",
    "Keep",
    "load_weights",
    "newest_checkpoint",
]

_LAZY = {  # these need torch
    "CheckpointManager": "flextrain.checkpoint.manager",
    "CheckpointState": "flextrain.checkpoint.manager",
    "CheckpointSaver": "flextrain.checkpoint.saver",
    "load_weights": "flextrain.checkpoint.reader",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'flextrain.checkpoint' has no attribute {name!r}")
