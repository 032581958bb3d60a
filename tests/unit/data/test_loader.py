"""StepLoader: any world reads the same global batch; any map-style dataset can be read."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.texts import small_config

from flextrain.data import ResumableDataset, SampleOrder, StepLoader
from flextrain.data.index_builder import build_index
from flextrain.data.loader import IGNORED, StepBatch
from flextrain.errors import DataError
from flextrain.world import World


def loader(dataset: Any, *, rank: int = 0, size: int = 1, batch: int = 6, micro: int = 4, **more: Any) -> StepLoader:
    order = SampleOrder(len(dataset), 3)
    return StepLoader(
        dataset, order, global_batch=batch, micro_batch=micro, world=World(rank, size, rank, size), **more
    )


def counted(batch: StepBatch) -> list[list[int]]:
    """The token sequences that count: first input, then every counted label."""
    rows = []
    for micro in batch.micros:
        for inputs, labels in zip(micro.input_ids_BT.tolist(), micro.labels_BT.tolist(), strict=True):
            targets = [label for label in labels if label != IGNORED]
            if targets:
                assert inputs[1 : len(targets)] == targets[:-1]
                rows.append([inputs[0], *targets])
    return rows


@pytest.fixture(scope="module")
def dataset(index_folder: Path) -> ResumableDataset:
    return ResumableDataset(index_file=index_folder, seq_length=9)


@given(size=st.integers(1, 9), batch=st.integers(1, 24), micro=st.integers(1, 8), step=st.integers(0, 200))
@settings(deadline=None, max_examples=60)
def test_any_world_reads_what_one_rank_reads(
    dataset: ResumableDataset, size: int, batch: int, micro: int, step: int
) -> None:
    [alone] = [loader(dataset, batch=batch, micro=batch).step(step)]
    together = [loader(dataset, rank=rank, size=size, batch=batch, micro=micro).step(step) for rank in range(size)]
    assert np.concatenate([part.ids for part in together]).tolist() == alone.ids.tolist()
    assert [row for part in together for row in counted(part)] == counted(alone)
    assert len({len(part.micros) for part in together}) == 1
    assert sum(part.tokens for part in together) == alone.tokens == batch * 9
    assert all(micro_.input_ids_BT.shape[0] <= micro for part in together for micro_ in part.micros)


def test_steps_are_stateless_and_follow_on_each_other(dataset: ResumableDataset) -> None:
    one = loader(dataset, batch=5)
    later = one.step(40)
    assert np.array_equal(loader(dataset, batch=5).step(40).ids, later.ids)
    assert np.array_equal(loader(dataset, batch=5, start_position=200).step(0).ids, later.ids)
    epoch = np.concatenate([one.step(step).ids for step in range(len(dataset))])[: len(dataset)]
    assert np.array_equal(np.sort(epoch), np.arange(len(dataset)))


def test_a_rank_with_nothing_to_read_still_runs_a_pass_that_counts_nothing(dataset: ResumableDataset) -> None:
    empty = loader(dataset, rank=0, size=3, batch=2).step(0)
    assert (empty.tokens, len(empty.ids), len(empty.micros)) == (0, 0, 1)
    assert empty.micros[0].input_ids_BT.shape == (1, 9)
    assert (empty.micros[0].labels_BT == IGNORED).all()


def test_tokens_per_step_are_known_where_all_samples_are_equal(dataset: ResumableDataset) -> None:
    assert loader(dataset, batch=7).tokens_per_step == 63
    assert loader([torch.arange(3)]).tokens_per_step is None


SEQUENCES = [[5, 6, 7, 8], [1, 2], [9, 9, 9]]


@pytest.mark.parametrize(
    "items",
    [
        [torch.tensor(s) for s in SEQUENCES],
        [torch.tensor(s, dtype=torch.int32) for s in SEQUENCES],
        [np.array(s, dtype=np.uint16) for s in SEQUENCES],
        SEQUENCES,
        [{"input_ids": s} for s in SEQUENCES],
        [{"input_ids": torch.tensor(s), "labels": torch.tensor(s)} for s in SEQUENCES],
        [{"input_ids": [*s, 0, 0], "attention_mask": [1] * len(s) + [0, 0]} for s in SEQUENCES],
        [{"input_ids": [*s, 0], "labels": [*s, IGNORED], "attention_mask": None} for s in SEQUENCES],
    ],
    ids=["tensors", "int32", "numpy", "lists", "dicts", "labels", "attention mask", "ignored labels"],
)
def test_items_are_shifted_and_padded(items: list[Any]) -> None:
    batch = loader(items, batch=3, micro=3).step(0)
    assert sorted(counted(batch)) == sorted(SEQUENCES)
    assert batch.tokens == batch.micros[0].tokens == 6
    assert batch.micros[0].input_ids_BT.dtype == batch.micros[0].labels_BT.dtype == torch.int64
    assert batch.micros[0].input_ids_BT.shape == batch.micros[0].labels_BT.shape


def test_masked_prompts_are_read_but_not_counted() -> None:
    [micro] = loader([{"input_ids": [1, 2, 3, 4], "labels": [IGNORED, IGNORED, 3, 4]}], batch=1).step(0).micros
    assert micro.input_ids_BT.tolist() == [[1, 2, 3]]
    assert micro.labels_BT.tolist() == [[IGNORED, 3, 4]]
    assert micro.tokens == 2


def test_sequences_without_a_next_token_count_nothing() -> None:
    batch = loader([torch.tensor([4]), torch.tensor([], dtype=torch.int64)], batch=2).step(0)
    assert batch.tokens == 0
    assert batch.micros[0].input_ids_BT.shape == (2, 1)


def test_hub_datasets_are_read_by_ids() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"input_ids": SEQUENCES, "attention_mask": [[1] * len(s) for s in SEQUENCES]})
    for form in (rows, rows.with_format("torch")):
        assert sorted(counted(loader(form, batch=3).step(0))) == sorted(SEQUENCES)


@pytest.mark.parametrize(
    ("item", "found"),
    [
        ({"text": "no tokens"}, "a mapping with text"),
        ("text", "a str"),
        (torch.ones(3), "torch.float32 tensor of shape"),
        (torch.ones(2, 3, dtype=torch.int64), r"shape \(2, 3\)"),
        ({"input_ids": [1, 2, 3], "labels": [1]}, "3 input_ids and 1 labels"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1]}, "3 input_ids and 1 attention_mask"),
        ((torch.ones(3, 2), 1), "a tuple"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_other_items_are_named_with_what_was_expected(item: Any, found: str) -> None:
    with pytest.raises(DataError, match=rf"sample 0 of the dataset is .*{found}.*; expected a 1-D tensor"):
        loader([item], batch=1).step(0)


def test_datasets_that_cannot_be_indexed_are_refused() -> None:
    class Stream:
        def __iter__(self) -> Any:
            yield torch.arange(3)

    order = SampleOrder(4, 0)
    with pytest.raises(DataError, match="Stream has no length"):
        StepLoader(Stream(), order, global_batch=1, micro_batch=1, world=World())
    with pytest.raises(DataError, match="list has 3 samples, the order is over 4"):
        StepLoader(SEQUENCES, order, global_batch=1, micro_batch=1, world=World())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned copies need CUDA")
def test_batches_arrive_on_cuda(dataset: ResumableDataset) -> None:
    there, here = loader(dataset, device="cuda").step(3), loader(dataset).step(3)
    assert there.micros[0].input_ids_BT.is_cuda
    assert counted(there) == counted(here)


def test_a_subset_of_an_index_dataset_is_not_shifted_twice(corpus_folder: Path, tmp_path: Path) -> None:
    uri, _ = build_index(small_config(corpus_folder), str(tmp_path / "index"), progress=False)
    dataset = ResumableDataset(index_file=uri, seq_length=16)
    subset = torch.utils.data.Subset(dataset, range(len(dataset)))
    [whole], [part] = loader(dataset, batch=1).step(0).micros, loader(subset, batch=1).step(0).micros
    assert torch.equal(whole.input_ids_BT, part.input_ids_BT)
    assert torch.equal(whole.labels_BT, part.labels_BT)
