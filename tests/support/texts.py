"""A small corpus of words that repeat, and configurations that index it in milliseconds."""

from pathlib import Path
from typing import Any

from flextrain.config.schema import DataConfig

WORDS = ("if", "else", "return", "lambda", "yield", "class", "import", "naïve", "𝄞", "pass")


def write_corpus(folder: Path, documents: int = 60) -> Path:
    """`folder` with a.jsonl, a document per line, and b.txt, one document more."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [" ".join(WORDS[(i * j) % len(WORDS)] for j in range(20 + i % 7)) for i in range(documents)]
    (folder / "a.jsonl").write_text("".join(f'{{"text": "{line}"}}\n' for line in lines), encoding="utf-8")
    (folder / "b.txt").write_text("\n".join(reversed(lines)), encoding="utf-8")
    return folder


def small_config(*sources: object, **changes: Any) -> DataConfig:
    values = {"tokenizer": "train:300", "heldout_fraction": 0.2, **changes}
    return DataConfig.model_validate({"sources": [str(source) for source in sources], **values})
