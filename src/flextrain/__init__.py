"""flextrain trains language models on machines that may vanish.

`Config` imports in a fraction of a second; the trainers, which need torch, load on first use.
"""

from typing import TYPE_CHECKING, Any

from flextrain.config.schema import Config

if TYPE_CHECKING:
    from flextrain.train.named import FSDPTrainer
    from flextrain.train.trainer import DistributedTrainer

__version__ = "0.1.0"
__all__ = ["Config", "DistributedTrainer", "FSDPTrainer", "__version__"]

_LAZY = {"DistributedTrainer": "flextrain.train.trainer", "FSDPTrainer": "flextrain.train.named"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'flextrain' has no attribute {name!r}")
