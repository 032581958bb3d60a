"""flextrain trains language models on machines that may vanish.

Importing it costs next to nothing: `Config` loads on first use, and so do the trainers, which need torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flextrain.config.schema import Config
    from flextrain.train.named import FSDPTrainer
    from flextrain.train.trainer import DistributedTrainer

__version__ = "0.1.0"
METAFLOW_PACKAGE_POLICY = "include"  # flows that import flextrain carry it in their code package
__all__ = ["Config", "DistributedTrainer", "FSDPTrainer", "__version__"]

_LAZY = {
    "Config": "flextrain.config.schema",
    "DistributedTrainer": "flextrain.train.trainer",
    "FSDPTrainer": "flextrain.train.named",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'flextrain' has no attribute {name!r}")
