"""Datasets and tokenizers of the hub: out of reach at once, and local folders read all the same."""

import json
from pathlib import Path

import pytest

from flextrain.data import hub
from flextrain.data.documents import Tally
from flextrain.data.sources import resolve_sources
from flextrain.data.tokenizer import load_tokenizer
from flextrain.errors import DataError

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a machine without network, wherever the test runs, with an empty cache."""
    monkeypatch.setattr("flextrain.hub.hub_reachable", lambda endpoint: False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def texts(spec: str, tally: Tally | None = None, text_key: str = "text") -> list[str]:
    [source] = resolve_sources([spec], text_key)
    return [document.text for document in source.documents(tally or Tally())]


@pytest.mark.parametrize("spec", ["hf:wikitext", "hf:wikitext/wikitext-2-raw-v1", "hf:owner/name/config"])
def test_a_dataset_out_of_reach_is_an_error_with_a_way_out(spec: str) -> None:
    with pytest.raises(DataError, match=f"{spec} cannot be loaded: ConnectionError: Couldn't reach") as caught:
        texts(spec)
    assert "the hub cannot be reached from here" in caught.value.remedy


@pytest.mark.parametrize("spec", ["gpt2", "meta-llama/Llama-2-7b-hf"])
def test_a_tokenizer_out_of_reach_is_never_replaced(spec: str) -> None:
    with pytest.raises(DataError, match=f"tokenizer '{spec}' cannot be loaded") as caught:
        load_tokenizer(spec, ["text"])
    assert "the hub cannot be reached from here" in caught.value.remedy


def test_names_with_a_slash_are_read_both_ways() -> None:
    assert hub._readings("wikitext") == [("wikitext", None)]
    assert hub._readings("a/b") == [("a/b", None), ("a", "b")]
    assert hub._readings("a/b/c") == [("a/b", "c")]


def test_a_saved_dataset_is_a_source(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": [f"row {i}" for i in range(3_000)] + ["", None]})
    rows.save_to_disk(tmp_path / "one")
    tally = Tally()
    assert texts(f"hf:{tmp_path / 'one'}", tally) == [f"row {i}" for i in range(3_000)]
    assert (tally.empty_documents, tally.bad_records) == (1, 1)
    [one], [again] = (resolve_sources([f"hf:{tmp_path / 'one'}"], "text") for _ in range(2))
    assert one.identity() == again.identity()
    assert one.size_bytes > 3_000 * len("row 1")


def test_of_several_splits_train_is_read(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": ["a"]})
    datasets.DatasetDict(test=rows, train=datasets.Dataset.from_dict({"text": ["b"]})).save_to_disk(tmp_path / "two")
    assert texts(f"hf:{tmp_path / 'two'}") == ["b"]
    datasets.DatasetDict(test=rows, validation=rows).save_to_disk(tmp_path / "none")
    with pytest.raises(DataError, match="has no split `train`; it has test, validation"):
        texts(f"hf:{tmp_path / 'none'}")


def test_a_folder_of_data_files_is_loaded_by_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps({"body": f"row {i}"}) + "\n" for i in range(5)))
    monkeypatch.chdir(tmp_path)
    assert texts("hf:./files", text_key="body") == [f"row {i}" for i in range(5)]
    with pytest.raises(DataError, match=r"hf:./files has no string column 'text'; its columns are body \(string\)"):
        texts("hf:./files")
