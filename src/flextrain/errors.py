"""Every error a user can meet, with a stable code that docs/troubleshooting.md explains.

    FlextrainError                FT-000
    ├── ConfigError               FT-CFG   a YAML file, an override or a flag is wrong            (also ValueError)
    ├── StorageError              FT-STO   a bucket, folder or object cannot be read or written   (also OSError)
    │   └── AlreadyExists         FT-STO   create-if-absent found the object there
    ├── DataError                 FT-DAT   a corpus, tokenizer or index is missing or unsound     (also ValueError)
    │   └── IndexCorrupt          FT-DAT   a shard differs from the hash its manifest recorded
    ├── ModelError                FT-MOD   a model cannot be built or does not fit its inputs     (also ValueError)
    ├── CheckpointError           FT-CKP   a checkpoint cannot be written, read or applied
    │   ├── CheckpointCorrupt     FT-CKP   bytes differ from their hash, or an object is gone
    │   └── CheckpointMismatch    FT-CKP   sound, but of another model or optimizer
    ├── GangError                 FT-GNG   a node or rank failed, or the gang could not form
    └── CostError                 FT-CST   a price or ledger cannot be read                       (also ValueError)

A message says what was found, what was expected and what to do. Commands print it without a traceback and exit with 2.
Broken invariants of our own are `assert`s, not these.
"""

from typing import Any


class FlextrainError(Exception):
    """Base of all of them: `number` picks the entry within the family, `remedy` says what to do."""

    family = "FT"

    def __init__(self, message: str, *, number: int = 0, remedy: str = "") -> None:
        self.code = f"{self.family}-{number:03d}"
        self.text, self.number, self.remedy = message, number, remedy
        super().__init__(f"{message}\n  → {remedy}" if remedy else message)

    def render(self) -> str:
        """The text a terminal shows: code, message, remedy."""
        return f"[{self.code}] {self}"

    def pack(self) -> dict[str, Any]:
        """This error as JSON, for another process to raise with `unpack`."""
        return {"kind": type(self).__name__, "message": self.text, "number": self.number, "remedy": self.remedy}


class ConfigError(FlextrainError, ValueError):
    family = "FT-CFG"


class StorageError(FlextrainError, OSError):
    family = "FT-STO"


class AlreadyExists(StorageError):
    """Create-if-absent found an object at that key: somebody else committed first."""


class DataError(FlextrainError, ValueError):
    family = "FT-DAT"


class IndexCorrupt(DataError):
    """A shard of a token index is truncated or differs from its recorded sha256."""


class ModelError(FlextrainError, ValueError):
    family = "FT-MOD"


class CheckpointError(FlextrainError):
    family = "FT-CKP"


class CheckpointCorrupt(CheckpointError):
    """Bytes differ from their hash, or an object the manifest names is gone."""


class CheckpointMismatch(CheckpointError):
    """The checkpoint is sound but belongs to another model, optimizer or data order."""


class GangError(FlextrainError):
    family = "FT-GNG"


class CostError(FlextrainError, ValueError):
    family = "FT-CST"


def unpack(packed: dict[str, Any]) -> FlextrainError:
    """The error that `pack` described, of the same kind."""
    kind = globals()[packed["kind"]]
    assert issubclass(kind, FlextrainError), packed
    error: FlextrainError = kind(packed["message"], number=packed["number"], remedy=packed["remedy"])
    return error
