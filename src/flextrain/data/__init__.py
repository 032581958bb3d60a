"""From text to samples: corpus, tokenizer, token index, the global order and the loader that cuts it for a rank.

Names load on first use, so that building an index never imports torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flextrain.data.dataset import ResumableDataset
    from flextrain.data.index import TokenIndexFile
    from flextrain.data.loader import StepLoader
    from flextrain.data.order import SampleOrder

__all__ = ["ResumableDataset", "SampleOrder", "StepLoader", "TokenIndexFile"]

_LAZY = {
    "ResumableDataset": "flextrain.data.dataset",
    "SampleOrder": "flextrain.data.order",
    "StepLoader": "flextrain.data.loader",
    "TokenIndexFile": "flextrain.data.index",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'flextrain.data' has no attribute {name!r}")
