"""How good a checkpoint is on text it has not seen: loss against baselines, and samples.

Names load on first use, so that reading a report never imports torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flextrain.evaluate.loss import heldout
    from flextrain.evaluate.report import EvalReport
    from flextrain.evaluate.suite import evaluate

__all__ = ["EvalReport", "evaluate", "heldout"]

_LAZY = {
    "EvalReport": "flextrain.evaluate.report",
    "evaluate": "flextrain.evaluate.suite",
    "heldout": "flextrain.evaluate.loss",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'flextrain.evaluate' has no attribute {name!r}")
