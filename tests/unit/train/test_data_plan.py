"""The data plan: fixed at the first start, kept by every resume, and never changed silently."""

import pytest

from flextrain.config import Config
from flextrain.errors import CheckpointMismatch
from flextrain.train.data_plan import DataPlan, plan_data


def config(**training: object) -> Config:
    return Config.model_validate({"training": {"batch_size": 4, **training}})


class Samples:
    """A dataset as far as plans are concerned."""

    def __init__(self, count: int = 1000, fingerprint: str = "") -> None:
        self.count, self.fingerprint = count, fingerprint

    def __len__(self) -> int:
        return self.count


def test_the_global_batch_of_a_new_run_is_that_of_its_first_world() -> None:
    assert plan_data(config(), Samples(), 3, None).global_batch == 12
    assert plan_data(config(global_batch_size=10), Samples(), 3, None).global_batch == 10


def test_a_resumed_run_keeps_its_global_batch_on_any_world() -> None:
    saved = plan_data(config(), Samples(), 3, None).to_dict()
    assert plan_data(config(), Samples(), 7, saved).global_batch == 12


@pytest.mark.parametrize(
    ("changed", "data", "seed", "said"),
    [
        ({"global_batch_size": 16}, Samples(), 0, "training.global_batch_size is 16; the run was started with 12"),
        ({}, Samples(999), 0, "the training data hold 999 samples; the run was started on 1000"),
        ({}, Samples(), 5, "main.seed is 5; the run was started with 0"),
        ({}, Samples(fingerprint="b"), 0, "the training data are b; the run was started on "),
    ],
)
def test_what_would_change_the_trajectory_is_refused(
    changed: dict[str, int], data: Samples, seed: int, said: str
) -> None:
    saved = plan_data(config(), Samples(), 3, None).to_dict()
    now = config(**changed)
    now.main.seed = seed
    with pytest.raises(CheckpointMismatch, match=said) as caught:
        plan_data(now, data, 3, saved)
    assert caught.value.remedy


def test_epochs_win_over_steps() -> None:
    plan = DataPlan(global_batch=10, num_samples=1000, seed=0)
    assert plan.last_step(config(max_steps=7)) == 7
    assert plan.last_step(config(max_steps=7, epochs=2)) == 200
    assert plan.last_step(config(epochs=0.001)) == 1
