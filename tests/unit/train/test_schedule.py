"""The learning rate: warm-up to the peak, cosine to the floor, for every step and length."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from flextrain.config import Config
from flextrain.train.schedule import learning_rate

TRAINING = Config().training


@given(st.integers(1, 5000), st.integers(0, 500))
def test_it_rises_to_the_peak_and_falls_to_the_floor(last_step: int, warmup: int) -> None:
    config = TRAINING.model_copy(update={"warmup_steps": warmup})
    rates = [learning_rate(step, last_step, config) for step in range(last_step)]
    top = min(warmup, last_step)
    assert all(0 < rate <= config.learning_rate * (1 + 1e-12) for rate in rates)
    assert all(a < b for a, b in pairwise(rates[:top]))
    assert all(a >= b for a, b in pairwise(rates[top:]))
    if last_step > top + 1:
        assert abs(rates[-1] - config.learning_rate * config.min_learning_rate_ratio) < 1e-9


def test_it_is_a_function_of_the_step_alone() -> None:
    assert learning_rate(70, 150, TRAINING) == learning_rate(70, 150, TRAINING.model_copy())
