"""Drawn states go from any world to any other, 1 to 4 ranks of DDP, FSDP2 and HSDP, and keep every bit.

The worlds are started once; each example is saved by one of them and loaded by others.
"""

import functools
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.support.gang import Gang
from tests.support.saved import save_now
from torch import nn

from flextrain.checkpoint import Catalog, CheckpointSaver
from flextrain.checkpoint.shards import _box, allocate_optimizer_state, model_state, optimizer_state
from flextrain.config import Config
from flextrain.parallel import apply, parallelize
from flextrain.storage import open_store
from flextrain.world import World

WORLDS = [(1, "ddp"), *((size, kind) for size in (2, 3, 4) for kind in ("ddp", "fsdp", "hsdp"))]
LOCAL_SIZES = {2: 1, 3: 3, 4: 2}  # of a node: hsdp replicates over nodes and shards within one
Spec = tuple[tuple[int, ...], str]  # shape and dtype


@dataclass(frozen=True)
class Drawn:
    """A state: parameters of the blocks, of the root, and buffers; `tied` gives the first of the root a second name."""

    blocks: list[list[Spec]]
    params: list[Spec]
    buffers: list[Spec]
    tied: bool
    seed: int


def specs(shapes: Any, *dtypes: str) -> Any:
    return st.tuples(shapes.map(tuple), st.sampled_from(dtypes))


params = specs(st.lists(st.integers(1, 9), min_size=1, max_size=3), "float32", "bfloat16", "float16")
buffers = specs(st.lists(st.integers(0, 5), max_size=3), "int8", "bool", "int64", "float32", "bfloat16", "uint8")
drawn = st.builds(
    Drawn,
    st.lists(st.lists(params, min_size=1, max_size=3), max_size=2),
    st.lists(params, min_size=1, max_size=4),
    st.lists(buffers, max_size=3),
    st.booleans(),
    st.integers(0, 10**6),
)


class Model(nn.Module):
    def __init__(self, state: Drawn) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Holder(block) for block in state.blocks])
        self.root, self.again = Holder(state.params), nn.Module()
        if state.tied:
            self.again.same = self.root.p0
        for index, (shape, dtype) in enumerate(state.buffers):
            self.register_buffer(f"b{index}", torch.zeros(shape).to(getattr(torch, dtype)))


class Holder(nn.Module):
    def __init__(self, specs: list[Spec]) -> None:
        super().__init__()
        for index, (shape, dtype) in enumerate(specs):
            self.register_parameter(f"p{index}", nn.Parameter(torch.zeros(shape, dtype=getattr(torch, dtype))))


def bits(seed: int, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose every bit follows from its name."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    top = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, top, (prod(shape) * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def build(world: World, strategy: str, state: Drawn) -> tuple[nn.Module, torch.optim.Optimizer]:
    if not hasattr(apply.make_mesh, "cache_info"):
        apply.make_mesh = functools.cache(apply.make_mesh)  # every mesh makes groups anew
    config = Config.model_validate({"distributed": {"strategy": strategy}})
    model = parallelize(Model(state), config, world, torch.device("cpu")).plain
    optimizer = torch.optim.AdamW(model.parameters())
    allocate_optimizer_state(model, optimizer)
    return model, optimizer


def parts(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> Iterator[tuple[str, Any, Any]]:
    """(name, what this rank holds of a tensor, what that should be)."""
    for name, tensor in (model_state(model) | optimizer_state(model, optimizer)).items():
        box = _box(name, tensor)
        whole = bits(seed, name, box.shape, tensor.dtype)
        yield name, box.local, whole[tuple(slice(a, a + n) for a, n in zip(box.start, box.local.shape, strict=True))]


def save(world: World, root: str, strategy: str, state: Drawn) -> None:
    model, optimizer = build(world, strategy, state)
    for _, local, value in parts(model, optimizer, state.seed):
        local.copy_(value)
    save_now(root, model, optimizer, 1, {})


def load(world: World, root: str, strategy: str, state: Drawn) -> list[str]:
    """The tensors that differ in a bit, or in name."""
    model, optimizer = build(world, strategy, state)
    manifest = CheckpointSaver(Catalog(open_store(root)), model, optimizer).load(Catalog(open_store(root)), 1)
    found = {name: (local, value) for name, local, value in parts(model, optimizer, state.seed)}
    wrong = [name for name, (local, value) in found.items() if not same(local, value)]
    return wrong + sorted(found.keys() ^ manifest.tensors.keys())


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.shape == b.shape and torch.equal(*raw)


@pytest.fixture(scope="module")
def gangs() -> Iterator[dict[int, Gang]]:
    made = {size: Gang(size, LOCAL_SIZES.get(size)) for size in (1, 2, 3, 4)}
    yield made
    for gang in made.values():
        gang.end()


def check(gangs: dict[int, Gang], state: Drawn, saver: tuple[int, str], loaders: list[tuple[int, str]]) -> None:
    memory = Path("/dev/shm")
    with TemporaryDirectory(prefix="resharding-", dir=memory if memory.is_dir() else None) as root:
        gangs[saver[0]].run(save, root, saver[1], state)
        while loaders:
            together = {size: (size, kind) for size, kind in loaders}.values()  # one of each size, at the same time
            with ExitStack() as waiting:
                for size, kind in together:
                    gangs[size].start(load, root, kind, state)
                    waiting.callback(expect_nothing_wrong, gangs[size], (saver, (size, kind)))
            loaders = [world for world in loaders if world not in together]


def expect_nothing_wrong(gang: Gang, what: Any) -> None:
    assert not [wrong for rank in gang.results() for wrong in rank], what


few = settings(max_examples=5, derandomize=True, deadline=None, database=None, phases=[Phase.explicit, Phase.generate])
many = settings(few, max_examples=40, suppress_health_check=[HealthCheck.too_slow])


@few
@given(drawn, st.sampled_from(WORLDS), st.lists(st.sampled_from(WORLDS), min_size=4, max_size=4, unique=True))
def test_a_state_keeps_every_bit_from_one_world_to_others(
    gangs: dict[int, Gang], state: Drawn, saver: tuple[int, str], loaders: list[tuple[int, str]]
) -> None:
    check(gangs, state, saver, loaders)


@pytest.mark.slow  # about two minutes
@many
@given(drawn, st.sampled_from(WORLDS))
def test_a_state_keeps_every_bit_from_any_world_to_all(
    gangs: dict[int, Gang], state: Drawn, saver: tuple[int, str]
) -> None:
    check(gangs, state, saver, WORLDS)
