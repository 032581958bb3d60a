"""Text to token ids and back: one class over `tokenizers`, trained here or taken from `transformers`.

Specs: `train:4096` trains a byte-level BPE of that vocabulary; anything else is a `transformers` name or local folder.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from flextrain.data.hub import load_auto_tokenizer
from flextrain.errors import DataError

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # every byte, and the end of text

TokenIds = npt.NDArray[np.uint32]


class Tokenizer:
    """Encodes and decodes; `end_of_text` is the id that closes every document, and no text encodes to it."""

    def __init__(self, backend: tokenizers.Tokenizer, end_of_text: int) -> None:
        """`backend` is copied: truncation and padding are off, and special tokens spelt out in a text are text."""
        self._backend = tokenizers.Tokenizer.from_str(backend.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        self._json = _canonical({"end_of_text": end_of_text, "tokenizer": json.loads(self._backend.to_str())})
        self._backend.encode_special_tokens = True
        self.end_of_text = end_of_text
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def train(cls, vocab_size: int, texts: Iterable[str]) -> "Tokenizer":
        """A byte-level BPE as GPT-2's: every text can be encoded and decodes to itself. The same texts give the same.

        Corpora too small for `vocab_size` give fewer tokens.
        """
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        end_of_text = backend.token_to_id(END_OF_TEXT)
        assert end_of_text is not None, "the trainer adds its special tokens"
        return cls(backend, end_of_text)

    @classmethod
    def from_transformers(cls, tokenizer: Any) -> "Tokenizer":
        """The fast tokenizer inside a `transformers` one. Raises DataError where it has none, or no end of sequence."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise DataError(
                f"{type(tokenizer).__name__} is no tokenizer that `tokenizers` can run",
                number=12,
                remedy="give a transformers tokenizer that has a tokenizer.json, a folder with one, or train:VOCAB",
            )
        for end_of_text in (tokenizer.eos_token_id, tokenizer.sep_token_id, backend.token_to_id(END_OF_TEXT)):
            if end_of_text is not None:
                return cls(backend, int(end_of_text))
        raise DataError(
            f"tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token to put between documents",
            number=12,
            remedy="set its eos_token and save it again",
        )

    @classmethod
    def from_json(cls, text: str) -> "Tokenizer":
        """The tokenizer that `to_json` wrote. Raises DataError where the text is not one."""
        try:
            value = json.loads(text)
            return cls(tokenizers.Tokenizer.from_str(json.dumps(value["tokenizer"])), int(value["end_of_text"]))
        except Exception as error:  # `tokenizers` raises plain Exception
            raise DataError(
                f"this is no tokenizer as flextrain stores it: {error}",
                number=12,
                remedy="build the index again",
            ) from error

    def to_json(self) -> str:
        """Everything needed to encode and decode, as canonical JSON."""
        return self._json

    @property
    def digest(self) -> str:
        """sha256 of `to_json`: equal digests encode equally."""
        return hashlib.sha256(self._json.encode()).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer.from_json, (self._json,)

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Ids of each text, without any special token; on all cores."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def encode(self, text: str) -> TokenIds:
        return self.encode_batch([text])[0]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special tokens appear as they are spelt."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)


def trained_vocabulary(spec: str) -> int | None:
    """4096 of `train:4096`; None for specs that name a tokenizer. Raises DataError for a size that cannot be."""
    kind, colon, size = spec.partition(":")
    if kind != "train" or not colon:
        return None
    if not size.isascii() or not size.isdigit() or int(size) < SMALLEST_VOCABULARY:
        raise DataError(
            f"tokenizer {spec!r} asks for no possible vocabulary",
            number=10,
            remedy=f"write train:SIZE with a whole number of at least {SMALLEST_VOCABULARY}, such as train:4096",
        )
    return int(size)


def load_tokenizer(spec: str, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer of a spec; only `train:SIZE` reads `texts`. Raises DataError, and never takes another instead."""
    vocab_size = trained_vocabulary(spec)
    if vocab_size is not None:
        return Tokenizer.train(vocab_size, texts)
    return Tokenizer.from_transformers(load_auto_tokenizer(spec))


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
