"""ResumableDataset: fixed-length samples of a token index, by id, and in the global order from a position on.

Shape suffixes: B samples, T tokens per sample.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from flextrain.config.schema import DataConfig
from flextrain.data.index import TokenIndexFile
from flextrain.data.index_builder import ensure_index
from flextrain.data.order import SampleOrder
from flextrain.data.sources import resolve_sources
from flextrain.data.tokenizer import Tokenizer, load_tokenizer
from flextrain.errors import DataError

OUTPUT_DIR = "runs"  # main.output_dir's default, for datasets that are made without a config
ITERATION_BLOCK = 256  # samples read at once when iterating

Sample = dict[str, Tensor]
PathLike = str | os.PathLike[str]


class ResumableDataset(Dataset[Sample]):
    """Sample i is tokens [i·T, i·T + T + 1) of a split: T inputs and, one further, their T labels.

    Map-style (`len`, `[i]`) for any loader; iterating gives the samples of the global order from `position` to the end
    of its epoch, and `state_dict` is a few numbers whatever the size of the data.
    """

    pre_shifted = True

    def __init__(
        self,
        data_files: Sequence[PathLike] | None = None,
        index_file: TokenIndexFile | PathLike | None = None,
        tokenizer: Any = None,
        seq_length: int = 256,
        seed: int = 0,
        split: str = "train",
        text_key: str = "text",
    ) -> None:
        """Open `index_file`, or build an index of `data_files` below ./runs/indexes where it is None.

        With both, the index must have been built from files of those names and sizes; `tokenizer` (a Tokenizer, one of
        transformers, or a spec such as train:4096) must be the index's. Raises DataError where they differ, where
        neither files nor index are given, and where the split is shorter than one sample.
        """
        if index_file is None:
            index_file = _build(data_files, tokenizer, text_key)
        elif not isinstance(index_file, TokenIndexFile):
            index_file = TokenIndexFile(index_file, split=split)
        self.index = index_file if index_file.split == split else index_file.other(split)
        if data_files is not None:
            _check_files(self.index, data_files, text_key)
        if tokenizer is not None:
            _check_tokenizer(self.index, tokenizer)
        self.seq_length = self.tokens_per_sample = seq_length
        self.order = SampleOrder(self._count_samples(), seed)
        self.position = 0

    def __len__(self) -> int:
        return self.order.num_samples

    def __getitem__(self, sample_id: int) -> Sample:
        """{"input_ids": int64 (T,), "targets": int64 (T,)}; targets[t] is the token after input_ids[t]."""
        return self.__getitems__([range(len(self))[sample_id]])[0]

    def __getitems__(self, sample_ids: Sequence[int]) -> list[Sample]:
        """Several at once, as torch's DataLoader asks for them."""
        input_ids_BT, labels_BT = self.batch(np.asarray(sample_ids, dtype=np.int64))
        return [{"input_ids": x, "targets": y} for x, y in zip(input_ids_BT, labels_BT, strict=True)]

    @property
    def fingerprint(self) -> str:
        """Names these samples: equal for equal text, tokenizer, split and length, on any machine."""
        return f"{self.index.digest[:32]}/{self.index.split}/{self.seq_length}"

    @property
    def tokenizer_digest(self) -> str:
        return self.index.tokenizer().digest

    def batch(self, sample_ids: np.ndarray[Any, np.dtype[np.int64]]) -> tuple[Tensor, Tensor]:
        """(input_ids_BT, labels_BT) of those samples, int64. Raises IndexError for an id that is not there."""
        tokens = torch.from_numpy(self.index.gather(sample_ids * self.seq_length, self.seq_length + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def __iter__(self) -> Iterator[Sample]:
        """From `position` to the end of its epoch; `position` is always that of the next sample not yet given."""
        end = (self.position // len(self) + 1) * len(self)
        while self.position < end:
            start = self.position
            ids = self.order.ids(start, min(ITERATION_BLOCK, end - start))
            for offset, sample in enumerate(self.__getitems__(ids.tolist())):
                if self.position != start + offset:  # load_state_dict was called meanwhile
                    break
                self.position += 1
                yield sample

    def state_dict(self) -> dict[str, Any]:
        """The position and what it belongs to; at most 256 bytes as JSON."""
        return {"position": self.position, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Raises DataError where it was taken from other samples or another order."""
        for key, here in self._identity().items():
            if state.get(key) != here:
                raise DataError(
                    f"the state is of another dataset: its {key} is {state.get(key)!r}, here it is {here!r}",
                    number=22,
                    remedy=f"open the dataset with the {key} of the state, or start from position 0",
                )
        position = state.get("position")
        if not isinstance(position, int) or position < 0:
            raise DataError(
                f"the state's position is {position!r}, not a whole number from 0",
                number=22,
                remedy="load a state that `state_dict` returned",
            )
        self.position = position

    def _identity(self) -> dict[str, Any]:
        return {
            "index": self.index.digest[:32],
            "split": self.index.split,
            "seq_length": self.seq_length,
            "seed": self.order.seed,
        }

    def _count_samples(self) -> int:
        count = (self.index.num_tokens - 1) // self.seq_length if self.seq_length > 0 else 0
        if count < 1:
            raise DataError(
                f"split {self.index.split!r} of {self.index.url} has {self.index.num_tokens} tokens; one sample of "
                f"seq_length {self.seq_length} takes {self.seq_length + 1}",
                number=19,
                remedy="give more text, a smaller data.seq_length from 1, or a larger data.heldout_fraction",
            )
        return count


def _build(data_files: Sequence[PathLike] | None, tokenizer: Any, text_key: str) -> TokenIndexFile:
    if data_files is None:
        raise DataError(
            "a dataset needs data_files or index_file; neither was given",
            number=25,
            remedy='give data_files=["train.jsonl"], or index_file="index.bin"',
        )
    given = tokenizer if tokenizer is None or isinstance(tokenizer, str) else _as_tokenizer(tokenizer)
    config = DataConfig(sources=_specs(data_files), text_key=text_key)
    if isinstance(given, str):
        config.tokenizer = given
    uri, _ = ensure_index(config, OUTPUT_DIR, tokenizer=given if isinstance(given, Tokenizer) else None)
    return TokenIndexFile(uri)


def _specs(data_files: Sequence[PathLike]) -> list[str]:
    files = [data_files] if isinstance(data_files, str | os.PathLike) else data_files
    return [os.fspath(file) for file in files]


def _as_tokenizer(tokenizer: Any) -> Tokenizer:
    return tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.from_transformers(tokenizer)


def _check_files(index: TokenIndexFile, data_files: Sequence[PathLike], text_key: str) -> None:
    given = {(source.name, source.size_bytes) for source in resolve_sources(_specs(data_files), text_key)}
    built = {(source["name"], source["size_bytes"]) for source in index.manifest.recipe["sources"]}
    if given != built:
        raise DataError(
            f"{index.url} was built from other files: {_few(built - given)} are not among data_files; "
            f"{_few(given - built)} are not in the index",
            number=20,
            remedy="build the index again from these files, or leave data_files out to take the index as it is",
        )


def _few(files: set[tuple[str, int]]) -> str:
    names = [f"{name} ({size_bytes} bytes)" for name, size_bytes in sorted(files)[:3]]
    return (", ".join(names) + (" …" if len(files) > 3 else "")) or "none"


def _check_tokenizer(index: TokenIndexFile, tokenizer: Any) -> None:
    built_with = index.manifest.recipe["tokenizer"]
    if isinstance(tokenizer, str) and (tokenizer == built_with):
        return
    if isinstance(tokenizer, str) and tokenizer.startswith("train:"):
        found = tokenizer
    else:
        given = load_tokenizer(tokenizer, ()) if isinstance(tokenizer, str) else _as_tokenizer(tokenizer)
        if given.digest == index.tokenizer().digest:
            return
        found = f"a tokenizer of {given.vocab_size} tokens, sha256:{given.digest[:16]}"
    raise DataError(
        f"{index.url} was built with another tokenizer ({built_with[:23]}, {index.vocab_size} tokens) than the one "
        f"given ({found})",
        number=21,
        remedy="give the index's own (`index.tokenizer()`), or build an index with the one you want",
    )
