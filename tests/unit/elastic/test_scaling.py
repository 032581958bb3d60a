"""Learning rate and accumulation that follow the number of ranks, in training loops of one's own."""

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flextrain.elastic import (
    GradAccumulationConfig,
    GradientAccumulationManager,
    LRScalingManager,
    ScalingConfig,
    ScalingRule,
)
from flextrain.errors import ConfigError

RANKS = st.integers(1, 64)


def optimizer(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates])


@pytest.mark.parametrize(("rule", "expected"), [("linear", 0.5e-4), ("sqrt", 0.5**0.5 * 1e-4), ("none", 1e-4)])
def test_the_rate_follows_the_batch_by_its_rule(rule: str, expected: float) -> None:
    config = ScalingConfig(base_lr=1e-4, base_batch_size=8, base_world_size=4, scaling_rule=ScalingRule(rule))
    adam = optimizer(1e-4)
    assert LRScalingManager(config, adam).on_topology_change(new_world_size=2) == pytest.approx(expected)
    assert adam.param_groups[0]["lr"] == pytest.approx(expected)


def test_warm_up_goes_in_a_line_from_the_old_rate_to_the_new() -> None:
    sgd = optimizer(1.0)
    manager = LRScalingManager(ScalingConfig(1.0, 8, 4, ScalingRule.LINEAR, warmup_steps=4), sgd)
    assert manager.on_topology_change(2) == 0.5
    assert sgd.param_groups[0]["lr"] == 1.0
    assert [manager.step_warmup() for _ in range(6)] == [0.875, 0.75, 0.625, 0.5, 0.5, 0.5]


def test_a_change_within_a_warm_up_goes_on_from_the_rate_there_is() -> None:
    manager = LRScalingManager(ScalingConfig(1.0, 8, 4, ScalingRule.LINEAR, warmup_steps=4), optimizer(1.0))
    manager.on_topology_change(2)
    manager.step_warmup()
    manager.on_topology_change(4)
    assert (manager.lr, [manager.step_warmup() for _ in range(4)][-1]) == (0.875, 1.0)


def test_groups_keep_their_proportions() -> None:
    sgd = optimizer(1.0, 0.1)
    LRScalingManager(ScalingConfig(1.0, 8, 4), sgd).on_topology_change(8)
    assert [group["lr"] for group in sgd.param_groups] == pytest.approx([2.0, 0.2])


@given(st.lists(RANKS, min_size=1, max_size=8), st.sampled_from(ScalingRule), st.integers(0, 5))
def test_there_and_back_is_where_it_was(worlds: list[int], rule: ScalingRule, warmup: int) -> None:
    sgd = optimizer(3e-4)
    manager = LRScalingManager(ScalingConfig(3e-4, 8, 4, rule, warmup), sgd)
    for world in [*worlds, 4]:
        manager.on_topology_change(world)
        for _ in range(warmup):
            manager.step_warmup()
    assert sgd.param_groups[0]["lr"] == pytest.approx(3e-4)


@given(st.integers(1, 2048), st.integers(1, 32), RANKS)
def test_the_global_batch_is_the_least_that_reaches_its_target(target: int, local: int, world: int) -> None:
    manager = GradientAccumulationManager(GradAccumulationConfig(target, local, base_world_size=1))
    steps = manager.on_topology_change(world)
    assert steps == manager.accumulation_steps
    assert (steps - 1) * local * world < target <= steps * local * world == manager.effective_global_batch_size
    assert [manager.should_step() for _ in range(2 * steps)] == ([False] * (steps - 1) + [True]) * 2


def test_a_batch_that_misses_its_target_is_spoken_of(caplog: pytest.LogCaptureFixture) -> None:
    manager = GradientAccumulationManager(GradAccumulationConfig(256, 8, base_world_size=4))
    assert (manager.accumulation_steps, caplog.messages) == (8, [])
    with caplog.at_level(logging.WARNING):
        manager.on_topology_change(3)
    assert (manager.accumulation_steps, manager.effective_global_batch_size) == (11, 264)
    assert "a global batch of 264 instead of 256" in caplog.messages[0]


def test_a_step_that_was_being_accumulated_begins_anew() -> None:
    manager = GradientAccumulationManager(GradAccumulationConfig(8, 2, base_world_size=1))
    assert [manager.should_step() for _ in range(3)] == [False] * 3
    manager.on_topology_change(2)
    assert [manager.should_step() for _ in range(2)] == [False, True]


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigError, match="base_lr is 0; expected more than 0"):
        ScalingConfig(0, 8, 4)
    with pytest.raises(ConfigError, match="local_batch_size is -1"):
        GradAccumulationConfig(8, -1, 1)
    manager = GradientAccumulationManager(GradAccumulationConfig(8, 2, 1))
    with pytest.raises(ConfigError, match="the new world size is 0"):
        manager.on_topology_change(0)
    with pytest.raises(ConfigError, match="cubic'; expected one of linear, sqrt, none"):
        ScalingConfig(1.0, 8, 4, "cubic")  # type: ignore[arg-type]
