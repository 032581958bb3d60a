"""torch.distributed.checkpoint with our writer and reader: any placement on a mesh of one or two axes to any other."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.support.gang import Gang
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from flextrain.checkpoint.catalog import read_manifest
from flextrain.checkpoint.chunks import in_order
from flextrain.checkpoint.dcp import FlextrainReader, FlextrainWriter
from flextrain.checkpoint.exchange import read_together
from flextrain.checkpoint.importing import import_checkpoint
from flextrain.checkpoint.reader import read_into
from flextrain.storage import open_store
from flextrain.world import World

SHAPES = [(4, 4), (5, 3), (1, 7), (3, 1), (2, 3, 5), (9,)]
ONE: list[tuple[Placement, ...]] = [(Shard(0),), (Shard(1),), (Replicate(),)]
TWO: list[tuple[Placement, ...]] = [
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (Shard(0), Shard(0)),
    (Replicate(), Shard(0)),
    (Shard(1), Replicate()),
]


@pytest.fixture(scope="module")
def gangs() -> Iterator[dict[int, Gang]]:
    made = {size: Gang(size) for size in (1, 2, 4)}
    yield made
    for gang in made.values():
        gang.end()


def meshes(world: World) -> list[tuple[DeviceMesh, tuple[Placement, ...]]]:
    if world.size == 1:
        return []
    shape, choices = ((world.size,), ONE) if world.size == 2 else ((2, world.size // 2), TWO)
    mesh = init_device_mesh("cpu", shape)
    return [(mesh, placements) for placements in choices]


def value(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def layouts(world: World, fill: float | None) -> list[dict[str, Any]]:
    """The same state in every layout that this world has: plain, or by each of its placements."""
    wholes = {f"t{i}": value(shape) if fill is None else torch.full(shape, fill) for i, shape in enumerate(SHAPES)}
    found: list[dict[str, Any]] = [] if meshes(world) else [dict(wholes)]
    for mesh, placements in meshes(world):
        dims = max((p.dim for p in placements if isinstance(p, Shard)), default=-1)
        found.append({n: distribute_tensor(t, mesh, placements) if t.ndim > dims else t for n, t in wholes.items()})
    return found


def save(world: World, root: str) -> int:
    states = layouts(world, None)
    for index, state in enumerate(states):
        dcp.save(state, storage_writer=FlextrainWriter(f"{root}/{world.size}-{index}"))
    return len(states)


def load(world: World, places: list[str]) -> list[str]:
    """The (place, layout, name) that came back wrong."""
    wrong = []
    for place in places:
        for index, state in enumerate(layouts(world, 0.0)):
            dcp.load(state, storage_reader=FlextrainReader(place))
            wrong += [f"{place} into {index}: {name}" for name in state if not right(name, state[name])]
        folder = open_store(place)
        for index, state in enumerate(layouts(world, 0.0)):
            read_together(in_order(folder), read_manifest(folder), state)
            wrong += [f"{place} together into {index}: {name}" for name in state if not right(name, state[name])]
    return wrong


def right(name: str, tensor: Any) -> bool:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return torch.equal(whole, value(SHAPES[int(name[1:])]))


def test_any_placement_loads_into_any_other(gangs: dict[int, Gang], tmp_path: Path) -> None:
    counts = {size: gang.run(save, str(tmp_path))[0] for size, gang in gangs.items()}
    assert counts == {1: 1, 2: len(ONE), 4: len(TWO)}
    places = [f"{tmp_path}/{size}-{index}" for size, count in counts.items() for index in range(count)]
    for gang in gangs.values():
        gang.start(load, places)
    for gang in gangs.values():
        assert gang.results() == [[]] * gang.size


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())  # type: ignore[no-any-return]


def trained(world: World, kind: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model in the layout `kind`, after some steps of Adam on the same data everywhere."""
    torch.manual_seed(0)
    net = Net()
    if kind == "tensor parallel and sharded":
        mesh = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(net, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(net, mesh=mesh["data"])
    elif kind == "hsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("copy", "shard")))
    elif kind == "fsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (world.size,)))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for step in range(steps):
        net(torch.full((2, 6), 1.0 + step)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def flat(world: World, net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model, optim = get_state_dict(net, optimizer)
    found: dict[str, Any] = {"step": world.size, "model": model, "optim": optim}
    return found


def numbers(state: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(state, dict):
        return {k: v for key, part in state.items() for k, v in numbers(part, f"{prefix}{key}/").items()}
    if isinstance(state, torch.Tensor):
        return {prefix: (state.full_tensor() if isinstance(state, DTensor) else state).clone().numpy()}
    return {}


def save_trained(world: World, place: str, kind: str) -> dict[str, Any]:
    state = flat(world, *trained(world, kind, steps=2))
    dcp.save(state, storage_writer=FlextrainWriter(place))
    return numbers(state)


def load_trained(world: World, place: str, kind: str) -> dict[str, Any]:
    net, optimizer = trained(world, kind, steps=1)
    state = flat(world, net, optimizer)
    dcp.load(state, storage_reader=FlextrainReader(place))
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return numbers(flat(world, net, optimizer))


KINDS = [(4, "tensor parallel and sharded"), (2, "fsdp"), (4, "hsdp"), (1, "plain")]


def test_torchs_state_dicts_of_models_and_optimizers_go_from_any_layout_to_any_other(
    gangs: dict[int, Gang], tmp_path: Path
) -> None:
    for size, kind in KINDS:
        place = str(tmp_path / kind)
        saved = gangs[size].run(save_trained, place, kind)[0]
        assert len(saved) == 4 + 3 * 4
        for other, layout in KINDS:
            for loaded in gangs[other].run(load_trained, place, layout):
                assert loaded.keys() == saved.keys()
                assert all((loaded[name] == saved[name]).all() for name in saved), (kind, layout)


def save_by_torch(world: World, place: str, kind: str) -> dict[str, Any]:
    state = flat(world, *trained(world, kind, steps=2))
    dcp.save(state, checkpoint_id=place)
    return numbers(state)


@pytest.mark.parametrize("kind", ["hsdp", "tensor parallel and sharded"])
def test_what_torch_saved_in_pieces_on_several_ranks_is_imported_whole(
    gangs: dict[int, Gang], tmp_path: Path, kind: str
) -> None:
    saved = gangs[4].run(save_by_torch, str(tmp_path / "torch"), kind)[0]
    assert len(list((tmp_path / "torch").glob("*.distcp"))) > 1
    made = import_checkpoint(tmp_path / "torch", str(tmp_path / "new"))
    tensors = {n: torch.zeros(e.shape, dtype=getattr(torch, e.dtype)) for n, e in made.manifest.tensors.items()}
    read_into(open_store(made.url), made.manifest, tensors)
    names = {key: key.strip("/").replace("optim/state/", "optim/").replace("/", ".") for key in saved}
    assert set(names.values()) == tensors.keys()
    assert all(torch.equal(tensors[name], torch.from_numpy(saved[key])) for key, name in names.items())
