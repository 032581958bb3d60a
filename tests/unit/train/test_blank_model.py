"""A model whose weights were not drawn, since a checkpoint was to replace them."""

from pathlib import Path

import pytest
import torch
from tests.support.tiny import SEQ_LENGTH, VOCAB, Recorder, Sequences, Stopped, tiny_config, train_tiny

from flextrain.elastic.place import RunPlace
from flextrain.errors import CheckpointCorrupt
from flextrain.model import build_model
from flextrain.train.trainer import DistributedTrainer


def blank_trainer(root: Path, recorder: Recorder) -> DistributedTrainer:
    config = tiny_config(checkpoint={"interval": 2})
    model = build_model(config.model, vocab_size=VOCAB, seq_length=SEQ_LENGTH, seed=None)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))  # what memory may hold
    place = RunPlace(root=str(root), events=f"{root}/events", run_id="tiny")
    return DistributedTrainer(model, config, Sequences(), hooks=[recorder], place=place, blank=True)


def test_it_never_trains_without_a_checkpoint(tmp_path: Path) -> None:
    recorder = Recorder()
    with pytest.raises(CheckpointCorrupt, match="the weights are not what training begins with"):
        blank_trainer(tmp_path, recorder).train()
    assert recorder.rows == []


def test_with_one_it_trains_as_any_other(tmp_path: Path) -> None:
    whole = Recorder(stop_after=5)
    train_tiny(tmp_path / "whole", tiny_config(checkpoint={"interval": 2}), [whole])
    train_tiny(tmp_path / "parts", tiny_config(checkpoint={"interval": 2}), [Recorder(stop_after=3)])
    second = Recorder(stop_after=5)
    with pytest.raises(Stopped):
        blank_trainer(tmp_path / "parts", second).train()
    assert second.rows == whole.rows[-len(second.rows) :]
    assert [step for step, *_ in second.rows] == [3, 4, 5]
