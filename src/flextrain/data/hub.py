"""Datasets and tokenizers of the Hugging Face hub, from its caches at once where there is no network."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flextrain.data.documents import Document, Record, Source, Tally, documents_of
from flextrain.data.readers import ROWS_PER_BATCH, check_column, row_record
from flextrain.errors import DataError
from flextrain.hub import hub_session


@dataclass(frozen=True)
class HubSource:
    """One split of a dataset that the `datasets` library has loaded: Arrow tables mapped from its cache."""

    name: str
    dataset: Any
    size_bytes: int
    text_key: str

    @property
    def place(self) -> str:
        return self.name

    def identity(self) -> str:
        return f"fingerprint:{self.dataset._fingerprint}"

    def documents(self, tally: Tally) -> Iterator[Document]:
        check_column(self.dataset.features.arrow_schema, self)
        yield from documents_of(self._rows(), self, tally)

    def _rows(self) -> Iterator[Record]:
        table = self.dataset.select_columns([self.text_key]).with_format("arrow")
        share_bytes = self.size_bytes / max(1, len(self.dataset))
        number = 0
        for batch in table.iter(batch_size=ROWS_PER_BATCH):
            for scalar in batch.column(0):
                number += 1
                yield row_record(number, scalar, self.text_key, share_bytes)


def load_hub_dataset(spec: str, text_key: str) -> Source:
    """The training split of `hf:NAME[/CONFIG]`; NAME is the hub's, or a local folder. Raises DataError."""
    loaded = _load(spec)
    if isinstance(loaded, dict):
        if "train" not in loaded and len(loaded) != 1:
            raise DataError(
                f"{spec} has no split `train`; it has {', '.join(loaded)}",
                number=7,
                remedy="save the split you want with `save_to_disk` and name that folder",
            )
        loaded = loaded.get("train", next(iter(loaded.values())))
    return HubSource(spec, loaded, int(loaded.data.nbytes), text_key)


def _load(spec: str) -> Any:
    import datasets

    name = spec.removeprefix("hf:")
    folder = Path(name).expanduser()
    reasons = []
    with hub_session() as offline:
        for dataset_name, config in _readings(name):
            try:
                if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
                    return datasets.load_from_disk(str(folder))
                return datasets.load_dataset(str(folder) if folder.is_dir() else dataset_name, config)
            except Exception as error:  # the library and the hub behind it raise whatever they like
                reasons.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason'}")
    raise DataError(
        f"{spec} cannot be loaded: {'; '.join(dict.fromkeys(reasons))}",
        number=7,
        remedy=_offline_remedy("the dataset") if offline else "check the name, its config and your access to it",
    )


def _readings(name: str) -> list[tuple[str, str | None]]:
    """Ways to read NAME[/CONFIG], as NAME may be `owner/dataset`: a/b is dataset a/b, else dataset a with config b."""
    parts = name.split("/")
    if Path(name).expanduser().is_dir() or len(parts) == 1:
        return [(name, None)]
    if len(parts) == 2:
        return [(name, None), (parts[0], parts[1])]
    return [("/".join(parts[:2]), "/".join(parts[2:]))]


def load_auto_tokenizer(spec: str) -> Any:
    """`transformers.AutoTokenizer` for a hub name or local folder. Raises DataError, at once without a network."""
    from transformers import AutoTokenizer

    with hub_session() as offline:
        try:
            return AutoTokenizer.from_pretrained(spec, local_files_only=offline, trust_remote_code=False)
        except Exception as error:  # OSError, ValueError, KeyError, ImportError: whatever the tokenizer's files lead to
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            remedy = "check the name and your access to it, or name a local folder with tokenizer.json"
            raise DataError(
                f"tokenizer {spec!r} cannot be loaded: {reason}",
                number=11,
                remedy=_offline_remedy("the tokenizer") if offline and not Path(spec).exists() else remedy,
            ) from error


def _offline_remedy(what: str) -> str:
    return (
        f"the hub cannot be reached from here: load {what} once where it can, then copy the cache, or use local files"
    )
