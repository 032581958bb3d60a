"""ResumableDataset: samples by id, the global order from a position, and a state of a few numbers."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.texts import write_corpus

from flextrain.data import ResumableDataset, SampleOrder, TokenIndexFile
from flextrain.data.index_builder import main
from flextrain.data.tokenizer import Tokenizer
from flextrain.errors import DataError


@pytest.fixture
def dataset(index_folder: Path) -> ResumableDataset:
    return ResumableDataset(index_file=index_folder, seq_length=16, seed=5)


def taken(dataset: ResumableDataset, count: int) -> list[list[int]]:
    samples = iter(dataset)
    return [next(samples)["input_ids"].tolist() for _ in range(count)]


def test_sample_i_is_the_ith_window_and_its_labels_are_one_further(
    index_folder: Path, dataset: ResumableDataset
) -> None:
    tokens = torch.from_numpy(TokenIndexFile(index_folder).tokens[:].astype(np.int64))
    assert len(dataset) == (len(tokens) - 1) // 16
    for i in (0, 7, len(dataset) - 1):
        sample = dataset[i]
        assert torch.equal(sample["input_ids"], tokens[i * 16 : i * 16 + 16])
        assert torch.equal(sample["targets"], tokens[i * 16 + 1 : i * 16 + 17])
        assert sample["targets"].dtype == torch.int64
    assert torch.equal(dataset[-1]["targets"], dataset[len(dataset) - 1]["targets"])
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_the_promised_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """API.md's data block, on files made here."""
    monkeypatch.chdir(tmp_path)
    (write_corpus(tmp_path, documents=400) / "a.jsonl").rename("train.jsonl")
    assert main(["train.jsonl", "-o", "index.bin", "--tokenizer", "train:300"]) == 0
    tokenizer = TokenIndexFile("index.bin").tokenizer()

    index = TokenIndexFile("index.bin")
    dataset = ResumableDataset(data_files=["train.jsonl"], index_file=index, tokenizer=tokenizer, seq_length=1024)
    state = dataset.state_dict()
    dataset.load_state_dict(state)

    assert dataset[0]["input_ids"].shape == (1024,)


def test_torch_loaders_take_it(dataset: ResumableDataset) -> None:
    [first, *_] = torch.utils.data.DataLoader(dataset, batch_size=4)
    assert first["input_ids"].shape == first["targets"].shape == (4, 16)
    assert torch.equal(first["targets"][2], dataset[2]["targets"])


def test_iterating_follows_the_global_order_epoch_by_epoch(dataset: ResumableDataset) -> None:
    order = SampleOrder(len(dataset), 5)
    for epoch in range(2):
        expected = [dataset[i]["input_ids"].tolist() for i in order.ids(epoch * len(dataset), len(dataset)).tolist()]
        assert [sample["input_ids"].tolist() for sample in dataset] == expected
    assert dataset.position == 2 * len(dataset)


@given(first=st.integers(0, 400), more=st.integers(0, 60))
@settings(deadline=None, max_examples=25)
def test_a_resumed_dataset_goes_on_where_the_state_was_taken(index_folder: Path, first: int, more: int) -> None:
    def make() -> ResumableDataset:
        return ResumableDataset(index_file=index_folder, seq_length=7, seed=1)

    def read(dataset: ResumableDataset, count: int) -> list[list[int]]:
        out: list[list[int]] = []
        while len(out) < count:
            out += taken(dataset, min(count - len(out), len(dataset) - dataset.position % len(dataset)))
        return out

    undisturbed, before, after = make(), make(), make()
    whole = read(undisturbed, first + more)
    head = read(before, first)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert head + read(after, more) == whole


def test_a_state_can_be_loaded_while_iterating(dataset: ResumableDataset) -> None:
    start = dataset.state_dict()
    samples = iter(dataset)
    first = [next(samples)["input_ids"].tolist() for _ in range(5)]
    dataset.load_state_dict(start)
    assert [next(samples)["input_ids"].tolist() for _ in range(5)] == first


def test_a_state_is_small_and_of_its_own_dataset_alone(index_folder: Path, dataset: ResumableDataset) -> None:
    dataset.position = 10**12
    state = dataset.state_dict()
    assert len(json.dumps(state)) <= 256
    others: list[tuple[str, dict[str, Any]]] = [
        ("seq_length", {"seq_length": 17, "seed": 5}),
        ("seed", {"seq_length": 16, "seed": 6}),
        ("split", {"seq_length": 16, "seed": 5, "split": "heldout"}),
    ]
    for key, arguments in others:
        other = ResumableDataset(index_file=index_folder, **arguments)
        with pytest.raises(DataError, match=f"of another dataset: its {key} is"):
            other.load_state_dict(state)
        assert other.position == 0
    for broken in ({**state, "index": "0" * 32}, {**state, "position": -1}, {**state, "position": "3"}, {}):
        with pytest.raises(DataError):
            dataset.load_state_dict(broken)
    assert dataset.position == 10**12


def test_it_travels_to_loader_workers(dataset: ResumableDataset) -> None:
    taken(dataset, 3)
    data = pickle.dumps(dataset)
    assert len(data) < 5_000
    again = pickle.loads(data)
    assert again.state_dict() == dataset.state_dict()
    assert taken(again, 2) == taken(dataset, 2)


def test_without_an_index_one_is_built_once_below_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path / "text")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        dataset = ResumableDataset(data_files=["text"], tokenizer="train:300", seq_length=8)
        assert len(list((tmp_path / "runs" / "indexes").iterdir())) == 1
    assert dataset.index.vocab_size <= 300
    again = ResumableDataset(data_files=["text"], tokenizer=dataset.index.tokenizer(), seq_length=8)
    assert torch.equal(again[0]["targets"], dataset[0]["targets"])


def test_files_that_the_index_was_not_built_from_are_named(
    corpus_folder: Path, index_folder: Path, tmp_path: Path
) -> None:
    ResumableDataset(data_files=[corpus_folder / "a.jsonl", str(corpus_folder / "b.txt")], index_file=index_folder)
    with pytest.raises(DataError, match=r"b\.txt \(\d+ bytes\) are not among data_files; none are not in the index"):
        ResumableDataset(data_files=[corpus_folder / "a.jsonl"], index_file=index_folder)
    (tmp_path / "c.txt").write_text("x")
    with pytest.raises(DataError, match=r"c\.txt \(1 bytes\) are not in the index"):
        ResumableDataset(data_files=[corpus_folder, tmp_path / "c.txt"], index_file=index_folder)


def test_tokenizers_must_be_the_indexs_own(index_folder: Path) -> None:
    own = TokenIndexFile(index_folder).tokenizer()
    for same in (own, "train:300", None):
        ResumableDataset(index_file=index_folder, tokenizer=same)
    for other in (Tokenizer.train(280, ["a b c"]), "train:301"):
        with pytest.raises(DataError, match="built with another tokenizer") as caught:
            ResumableDataset(index_file=index_folder, tokenizer=other)
        assert "index.tokenizer()" in caught.value.remedy
    with pytest.raises(DataError, match="no tokenizer that `tokenizers` can run"):
        ResumableDataset(index_file=index_folder, tokenizer=object())


def test_a_transformers_tokenizer_can_be_the_indexs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "text")
    backend = Tokenizer.train(290, ["pass return lambda " * 20])._backend
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    dataset = ResumableDataset(data_files=["text"], tokenizer=fast, seq_length=8)
    fast(["mutates its truncation state"], truncation=True, max_length=3)
    ResumableDataset(index_file=dataset.index, tokenizer=fast, seq_length=8)


@pytest.mark.parametrize(
    ("arguments", "message"), [({}, "data_files or index_file"), ({"data_files": ["none.txt"]}, "does not exist")]
)
def test_nothing_to_read_is_a_mistake(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        ResumableDataset(**arguments)


@pytest.mark.parametrize("seq_length", [0, -3, 10**6])
def test_a_split_shorter_than_a_sample_says_how_short(index_folder: Path, seq_length: int) -> None:
    with pytest.raises(DataError, match=r"split 'train' .* has \d+ tokens; one sample of seq_length"):
        ResumableDataset(index_file=index_folder, seq_length=seq_length)
