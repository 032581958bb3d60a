"""An optimizer's state before its first step: what a step would create, as zeros."""

import pytest
import torch
from torch import nn

from flextrain.checkpoint.shards import allocate_optimizer_state, untouched_zeros

SETTINGS = [
    {},
    {"amsgrad": True},
    {"fused": True},
    {"fused": True, "amsgrad": True},
    {"foreach": True},
    {"weight_decay": 0.3, "maximize": True},
]


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(200, 300), nn.LayerNorm(300), nn.Linear(300, 3)).to(dtype)


def described(optimizer: torch.optim.Optimizer) -> list[list[tuple[object, ...]]]:
    return [
        [(key, value.dtype, value.shape, value.stride(), value.device) for key, value in optimizer.state[p].items()]
        for group in optimizer.param_groups
        for p in group["params"]
    ]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_made_for_adam_is_what_its_step_makes(
    kind: type[torch.optim.Optimizer], settings: dict[str, object], dtype: torch.dtype
) -> None:
    model, stepped = network(dtype), network(dtype)
    optimizer, other = kind(model.parameters(), **settings), kind(stepped.parameters(), **settings)  # type: ignore[call-arg]
    allocate_optimizer_state(model, optimizer)
    for parameter in stepped.parameters():
        parameter.grad = torch.ones_like(parameter)
    other.step()
    assert described(optimizer) == described(other)
    assert all(not value.any() for state in optimizer.state.values() for value in state.values())


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_training_goes_on_as_if_nothing_had_been_allocated(kind: type[torch.optim.Optimizer]) -> None:
    models = network(), network()
    optimizers = [kind(model.parameters(), lr=0.1) for model in models]  # type: ignore[call-arg]
    allocate_optimizer_state(models[1], optimizers[1])
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.ones(4, 200)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_untouched_zeros_are_zeros_to_write_to() -> None:
    like = torch.ones(300, 200)
    first, second = untouched_zeros(like), untouched_zeros(like)
    assert first.data_ptr() % 64 == 0
    first += 1
    assert torch.equal(first, like)
    assert torch.equal(second, torch.zeros(300, 200))
    turned = untouched_zeros(like.T)
    assert turned.stride() == like.T.stride()
