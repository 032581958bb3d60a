"""What is inside an index: the manifest that commits it, and the names of the files beside it.

An index is a folder or URL prefix: `{split}-00000.bin` holds tokens (u16 or u32, little endian), `{split}-00000.ends`
the positions after each document's end of text (u64, counted from the start of the split), and `manifest.json`, written
last, says that the rest is whole. Every shard but a split's last holds `shard_tokens` tokens.
"""

import hashlib
import json
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flextrain.errors import DataError, IndexCorrupt, StorageError
from flextrain.storage import Store

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
ENDS_DTYPE = np.dtype("<u8")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Shard(_Record):
    """One .bin file and its .ends."""

    name: str
    tokens: int = Field(ge=1)
    documents: int = Field(ge=0)
    tokens_sha256: str
    ends_sha256: str

    @property
    def tokens_key(self) -> str:
        return f"{self.name}.bin"

    @property
    def ends_key(self) -> str:
        return f"{self.name}.ends"


class SplitStats(_Record):
    """One split: how much it holds and in which shards. `text_bytes` is UTF-8, without document ends."""

    documents: int = Field(ge=1)
    tokens: int = Field(ge=1)
    text_bytes: int = Field(ge=1)
    shards: tuple[Shard, ...] = Field(min_length=1)


class Skipped(_Record):
    """What the builder left out, with the first few bad records quoted."""

    empty_documents: int = 0
    bad_records: int = 0
    examples: tuple[str, ...] = ()


class Manifest(_Record):
    """Everything about an index but its tokens. `recipe` is what it was made from, as `recipe_digest` sums up."""

    format: Literal["flextrain-index"] = "flextrain-index"
    version: int = FORMAT_VERSION
    recipe: dict[str, Any]
    recipe_digest: str
    dtype: Literal["uint16", "uint32"]
    vocab_size: int = Field(ge=1)
    shard_tokens: int = Field(ge=1)
    tokenizer: dict[str, Any]
    splits: dict[str, SplitStats]
    skipped: Skipped = Skipped()

    @cached_property
    def digest(self) -> str:
        """sha256 over the canonical JSON: equal digests are equal tokens, in equal order."""
        return digest_of(self.model_dump(mode="json"))

    @property
    def token_dtype(self) -> np.dtype[Any]:
        return np.dtype(self.dtype).newbyteorder("<")

    def to_json(self) -> bytes:
        return canonical({**self.model_dump(mode="json"), "digest": self.digest})

    def files(self, split: str) -> Iterator[tuple[str, int, str]]:
        """Key, size in bytes and sha256 of every file of a split."""
        for shard in self.splits[split].shards:
            yield shard.tokens_key, shard.tokens * self.token_dtype.itemsize, shard.tokens_sha256
            yield shard.ends_key, shard.documents * ENDS_DTYPE.itemsize, shard.ends_sha256


def dtype_for(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The smallest type that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}"


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no spaces: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def digest_of(value: Any) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()


def read_manifest(store: Store) -> Manifest | None:
    """The manifest of the index at `store`; None where there is none, so no finished index.

    Raises IndexCorrupt where it is broken or was changed, DataError for another version, StorageError where the store
    fails.
    """
    try:
        data = store.get(MANIFEST)
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise
    place = store.url_of(MANIFEST)
    try:
        value = json.loads(data)
        version, digest = value["version"], value.pop("digest")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _broken(place, f"no JSON of an index ({error})") from error
    if version != FORMAT_VERSION:
        raise DataError(
            f"{place} has format version {version}, this flextrain reads version {FORMAT_VERSION}",
            number=15,
            remedy="build the index again, or use the flextrain that built it",
        )
    if digest != digest_of(value):
        raise _broken(place, "its content does not have the digest that it records")
    try:
        return Manifest.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        raise _broken(place, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _broken(place: str, found: str) -> IndexCorrupt:
    return IndexCorrupt(f"{place} is broken: {found}", number=14, remedy="delete the folder and build the index again")
