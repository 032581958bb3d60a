"""Durable state: raw chunks with hashes, one manifest per step whose creation is the commit, any world size to any.

<root>/step-00000050/<attempt>/rank-00000.bin    immutable, written by every rank
<root>/step-00000050/<attempt>/rank-00000.json   what the rank signs off: where its boxes lie in it, or its error
<root>/step-00000050/<attempt>/verdict.json      created if absent: rank 0 commits these parts, or somebody removes them
<root>/step-00000050/manifest.json               created if absent: from then on the checkpoint exists
<root>/generations/00000007.json                 created if absent: who may commit here, until there is a newer one
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
