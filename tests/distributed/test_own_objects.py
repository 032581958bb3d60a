"""A trainer made from one's own objects on several ranks, as under torchrun: they agree on one place for the run."""

from pathlib import Path

import pytest
from tests.support.ranks import run_ranks
from tests.support.tiny import SEQ_LENGTH, VOCAB, Sequences, tiny_config

from flextrain.errors import FlextrainError
from flextrain.model import build_model
from flextrain.train.trainer import DistributedTrainer
from flextrain.world import World


def train(world: World, root: str, max_steps: int, storage: str | None) -> tuple[str, int, float]:
    config = tiny_config(
        main={"output_dir": root},
        training={"global_batch_size": 10, "batch_size": 3, "max_steps": max_steps},
        checkpoint={"storage": storage},
    )
    model = build_model(config.model, vocab_size=VOCAB, seq_length=SEQ_LENGTH, seed=0)
    trainer = DistributedTrainer(model, config, Sequences())
    metrics = trainer.train()
    return trainer.place.root, trainer.place.attempt, metrics["loss"]


def first_loss(world: World, root: str, strategy: str, seed: int) -> float:
    """The loss of one step of a model that every rank initialised for itself."""
    config = tiny_config(main={"output_dir": root}, distributed={"strategy": strategy})
    config.training.max_steps = 1
    model = build_model(config.model, vocab_size=VOCAB, seq_length=SEQ_LENGTH, seed=seed + world.rank)
    return float(DistributedTrainer(model, config, Sequences()).train()["loss"])


def refused(world: World, root: str, storage: str) -> str:
    try:
        train(world, root, 2, storage)
    except FlextrainError as error:
        return str(error)
    return "nothing was refused"


def test_ranks_agree_on_one_place_and_any_world_goes_on_from_it(tmp_path: Path) -> None:
    first = run_ranks(2, train, str(tmp_path), 4, None)
    assert first[0] == first[1]
    second = run_ranks(1, train, str(tmp_path), 6, None) + run_ranks(2, train, str(tmp_path), 8, None)
    assert {root for root, _, _ in second} == {first[0][0]}
    assert [attempt for _, attempt, _ in second] == [1, 2, 2]
    assert len(list((tmp_path / "default").iterdir())) == 1


def test_a_place_that_cannot_be_is_refused_on_every_rank(tmp_path: Path) -> None:
    said = run_ranks(2, refused, str(tmp_path), "ftp://host/checkpoints")
    assert said[0] == said[1]
    assert "ftp://host" in said[0]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_models_that_ranks_initialised_apart_become_rank_0s(strategy: str, tmp_path: Path) -> None:
    (alone,) = run_ranks(1, first_loss, str(tmp_path / "alone"), "ddp", 5)
    for loss in run_ranks(2, first_loss, str(tmp_path / "together"), strategy, 5):
        assert loss == pytest.approx(alone, rel=1e-5)
