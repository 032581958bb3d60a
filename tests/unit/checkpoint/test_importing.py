"""Checkpoints of others become ours bit by bit, and nothing in them runs, leads elsewhere or takes absurd memory."""

import errno
import json
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.support.saved import save_now
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from flextrain.checkpoint import Catalog, CheckpointSaver, importing, load_weights
from flextrain.checkpoint.export import export_dcp, export_safetensors
from flextrain.checkpoint.importing import import_checkpoint
from flextrain.checkpoint.manifest import ITEM_BYTES
from flextrain.checkpoint.reader import read_into, verify
from flextrain.checkpoint.shards import allocate_optimizer_state, model_state, optimizer_state
from flextrain.errors import CheckpointError, CheckpointMismatch, StorageError
from flextrain.storage import open_store


@pytest.fixture(autouse=True)
def _one_process_is_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        yield


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 9, dtype=torch.bfloat16)
        self.tied = self.head


def trained(seed: int) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    allocate_optimizer_state(net, optimizer)
    for tensor in everything(net, optimizer).values():
        tensor.copy_(torch.randint(-99, 99, tensor.shape))
    return net, optimizer


def everything(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return model_state(net) | optimizer_state(net, optimizer)


def same(net: nn.Module, optimizer: torch.optim.Optimizer, other: tuple[nn.Module, torch.optim.Optimizer]) -> bool:
    a, b = everything(net, optimizer), everything(*other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_export_and_import_of_the_whole_state_is_a_round_trip(tmp_path: Path) -> None:
    net, optimizer = trained(1)
    facts = {"position": 84, "note": "näme"}
    export_dcp(save_now(tmp_path / "run", net, optimizer, 7, facts), tmp_path / "dcp")
    made = import_checkpoint(tmp_path / "dcp", str(tmp_path / "new"))
    assert made.url == str(tmp_path / "new" / "step-00000007")
    assert (made.manifest.state, made.left_out) == (facts, [])
    other = trained(2)
    catalog = Catalog(open_store(tmp_path / "new"))
    assert CheckpointSaver(catalog, *other).load(catalog, 7) == made.manifest
    assert same(net, optimizer, other)
    export_dcp(made.url, tmp_path / "again")
    again = import_checkpoint(tmp_path / "again", str(tmp_path / "third"))
    assert {name: (e.dtype, e.shape) for name, e in again.manifest.tensors.items()} == {
        name: (e.dtype, e.shape) for name, e in made.manifest.tensors.items()
    }
    [chunks] = [entry.chunks for entry in made.manifest.objects.values()]
    assert [entry.chunks for entry in again.manifest.objects.values()] == [chunks], "the same bytes, by their hash"


@pytest.mark.parametrize("max_file_bytes", [1 << 30, 100])
def test_export_and_import_of_weights_is_a_round_trip(tmp_path: Path, max_file_bytes: int) -> None:
    net, optimizer = trained(1)
    url = save_now(tmp_path / "run", net, optimizer, 12, {})
    files = export_safetensors(url, tmp_path / "out", max_file_bytes=max_file_bytes)
    assert (len(files) > 1) == (max_file_bytes == 100)
    made = import_checkpoint(tmp_path / "out", str(tmp_path / "new"))
    assert made.manifest.step == 12
    other, _ = trained(2)
    load_weights(made.url, other)
    assert all(torch.equal(t, model_state(net)[name]) for name, t in model_state(other).items())


def test_a_model_and_optimizer_that_torch_saved_itself(tmp_path: Path) -> None:
    net, optimizer = trained(1)
    model, optim = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optim": optim, "epoch": 3}, checkpoint_id=tmp_path / "torch", no_dist=True)
    made = import_checkpoint(tmp_path / "torch", str(tmp_path / "step-00000042"))
    assert made.url == str(tmp_path / "step-00000042")
    assert "epoch" in made.left_out
    names = [name for name in made.left_out if name != "epoch"]
    assert all(name.startswith("optim.param_groups.") for name in names)
    state = {n: torch.zeros_like(t) for n, t in everything(net, optimizer).items() if n in made.manifest.tensors}
    assert {n for n in everything(net, optimizer) if n.startswith("optim.")} <= state.keys()
    extra = made.manifest.tensors.keys() - state.keys()
    assert all(name.startswith("model.tied.") for name in extra), "torch names tied weights twice"
    tensors = {n: torch.zeros(e.shape, dtype=getattr(torch, e.dtype)) for n, e in made.manifest.tensors.items()}
    read_into(open_store(made.url), made.manifest, tensors)
    assert all(torch.equal(tensors[n], everything(net, optimizer)[n]) for n in state)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(sorted(ITEM_BYTES))), max_size=5),
    st.sampled_from(["dcp", "safetensors"]),
)
def test_any_tensors_keep_every_bit(
    tmp_path_factory: pytest.TempPathFactory, specs: list[tuple[list[int], str]], kind: str
) -> None:
    tmp, tensors = tmp_path_factory.mktemp("any"), {}
    for index, (shape, dtype) in enumerate(specs):
        size_bytes = ITEM_BYTES[dtype] * torch.Size(shape).numel()
        raw = torch.randint(0, 2 if dtype == "bool" else 256, (size_bytes,), dtype=torch.uint8)
        if kind == "dcp" or dtype in importing.DTYPES.values():
            tensors[f"t{index}"] = raw.view(getattr(torch, dtype)).reshape(shape)
    (tmp / "source").mkdir()
    if kind == "dcp":
        dcp.save(dict(tensors), checkpoint_id=tmp / "source", no_dist=True)
    else:
        save_file(tensors, tmp / "source" / "model.safetensors")
    made = import_checkpoint(tmp / "source", str(tmp / "new"))
    found = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in tensors.items()}
    read_into(open_store(made.url), made.manifest, found)
    for name, tensor in tensors.items():
        a, b = found[f"model.{name}"], tensor
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def test_many_tensors_become_several_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "OBJECT_BYTES", 100)
    tensors = {f"t{i}": torch.full((size,), float(i)) for i, size in enumerate([5, 10, 15, 80, 1, 1])}
    save_file(tensors, tmp_path / "model.safetensors")
    made = import_checkpoint(tmp_path, str(tmp_path / "new"))
    assert [entry.size_bytes for entry in made.manifest.objects.values()] == [128, 64, 320, 128]
    verify(open_store(made.url), made.manifest)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def torch_folder(place: Path) -> tuple[Path, Any]:
    """A folder of torch's and its metadata, to be made hostile."""
    dcp.save({"w": torch.arange(6.0).view(2, 3), "n": 3}, checkpoint_id=place, no_dist=True)
    return place, pickle.loads((place / ".metadata").read_bytes())


def refuse(place: Path, *said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        import_checkpoint(place, str(place / "new"))
    assert all(text in str(caught.value) for text in said), caught.value
    assert not (place / "new").exists(), "a part of it was imported"


def test_metadata_that_would_run_code_are_refused_by_name(tmp_path: Path) -> None:
    place, metadata = torch_folder(tmp_path / "c")
    for where in ("planner_data", "storage_meta"):
        metadata.planner_data = None
        setattr(metadata, where, Bomb(tmp_path / "ran"))
        (place / ".metadata").write_bytes(pickle.dumps(metadata))
        refuse(place, "posix.mkdir", "no sound metadata")
        assert not (tmp_path / "ran").exists()
    pickle.loads((place / ".metadata").read_bytes())
    assert (tmp_path / "ran").exists(), "the bytes were harmless, so this test showed nothing"


CODE = {
    "a function of torch": b"\x80\x04\x8c\x05torch\x8c\x04load\x93\x8c\x01xR.",
    "a builtin": b"cbuiltins\neval\n(Vopen('ran','w')\ntR.",
    "an attribute of an attribute": b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93\x8c\x02ls\x85R.",
    "an attribute of a record": b"\x80\x04\x8c'torch.distributed.checkpoint.metadata\x8c\x11Metadata.__init__\x93.",
    "an old instance": b"(Vid\nios\nsystem\n.",
    "a persistent id": b"Pabc\n.",
    "an extension": b"\x80\x02\x82\x01.",
    "nothing": b"",
    "half": b"\x80\x04\x8c\x05tor",
    "a number": b"I5\n.",
    "a list without end": b"]" * 100_000 + b".",
}


@pytest.mark.parametrize("what", CODE)
def test_any_other_pickle_is_refused(tmp_path: Path, what: str) -> None:
    (tmp_path / ".metadata").write_bytes(CODE[what])
    refuse(tmp_path, "no sound metadata")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 10**6))
def test_random_bytes_in_metadata_are_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, where: int
) -> None:
    place = tmp_path_factory.mktemp("noise")
    raw = pickle.dumps({"a": 1})
    at = where % len(raw)
    (place / ".metadata").write_bytes(raw[:at] + noise + raw[at:])
    refuse(place, "no sound metadata")


def piece(metadata: Any) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == "w")


def huge(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["w"]
    entry.size = torch.Size([1 << 40, 3])
    entry.chunks[0].sizes = torch.Size([1 << 40, 3])


def overlapping(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["w"]
    entry.size = torch.Size([1, 3])


def of_many_dims(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["w"]
    entry.size = torch.Size([2, 3] + [1] * 62 + [1 << 40])


HOSTILE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a file elsewhere": (lambda m: setattr(piece(m), "relative_path", "../secret"), "does not lie in the folder"),
    "an absolute file": (lambda m: setattr(piece(m), "relative_path", "/etc/passwd"), "does not lie in the folder"),
    "a file that is not there": (lambda m: setattr(piece(m), "relative_path", "x"), "No such file"),
    "a size that is not there": (huge, "bytes"),
    "pieces that do not tile": (overlapping, "do not tile its shape [1, 3]"),
    "a thousand dims": (of_many_dims, "do not tile its shape"),
    "bytes that are not there": (lambda m: setattr(piece(m), "length", 1 << 40), "is shorter than"),
    "bytes before the file": (lambda m: setattr(piece(m), "offset", -5), "at byte -5"),
    "another entry's bytes": (lambda m: setattr(piece(m), "offset", piece(m).offset + 64), "cannot be imported"),
    "an extension": (lambda m: setattr(piece(m), "transform_descriptors", ["zstd"]), "extension"),
    "a tensor of no dtype": (
        lambda m: setattr(m.state_dict_metadata["w"].properties, "dtype", torch.quint8),
        "quint8, which this format does not hold",
    ),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_hostile_folders_are_refused(tmp_path: Path, how: str) -> None:
    place, metadata = torch_folder(tmp_path)
    change, said = HOSTILE[how]
    change(metadata)
    (place / ".metadata").write_bytes(pickle.dumps(metadata))
    refuse(place, said)


def test_a_file_behind_a_link_and_a_value_that_takes_code_are_refused(tmp_path: Path) -> None:
    place, metadata = torch_folder(tmp_path / "c")
    [data] = place.glob("*.distcp")
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    refuse(place, "symbolic link")
    data.unlink()
    torch.save(Bomb(tmp_path / "ran"), data)
    piece(metadata).offset, piece(metadata).length = 0, data.stat().st_size
    metadata.storage_data = {index: info for index, info in metadata.storage_data.items() if index.fqn == "w"}
    (place / ".metadata").write_bytes(pickle.dumps(metadata))
    refuse(place, "cannot be imported")
    assert not (tmp_path / "ran").exists()


def index_of(files: dict[str, str]) -> str:
    return json.dumps({"weight_map": files})


BROKEN: dict[str, dict[str, Any]] = {
    "an empty folder": {},
    "a file that is not there": {"model.safetensors.index.json": index_of({"a": "x.safetensors"})},
    "a file elsewhere": {"model.safetensors.index.json": index_of({"a": "../model.safetensors"})},
    "an index of something else": {"model.safetensors.index.json": "[]"},
    "no index": {"model.safetensors.index.json": "{"},
    "no tensors": {"model.safetensors": "x" * 100},
}


@pytest.mark.parametrize("how", BROKEN)
def test_broken_safetensors_are_refused(tmp_path: Path, how: str) -> None:
    for name, text in BROKEN[how].items():
        (tmp_path / name).write_text(text)
    refuse(tmp_path, "cannot be imported")


def test_an_import_that_fails_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "OBJECT_BYTES", 100)
    save_file({f"t{i}": torch.ones(20) for i in range(5)}, tmp_path / "model.safetensors")
    persist, calls = importing.persist, []

    def third_fails(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return persist(*args)

    monkeypatch.setattr(importing, "persist", third_fails)
    with pytest.raises(StorageError, match="No space left"):
        import_checkpoint(tmp_path, str(tmp_path / "new"))
    assert not [path for path in (tmp_path / "new").rglob("*") if path.is_file()]


def test_the_same_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for file in "ab":
        save_file({"w": torch.ones(2)}, tmp_path / f"{file}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index_of({"w": "a.safetensors", "v": "b.safetensors"}))
    refuse(tmp_path, "model.w is in two of its files")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, tmp_path / "model.safetensors")
    first = import_checkpoint(tmp_path, str(tmp_path / "new"))
    with pytest.raises(CheckpointError, match="holds a checkpoint already"):
        import_checkpoint(tmp_path, str(tmp_path / "new"))
    catalog = Catalog(open_store(tmp_path / "new"))
    assert catalog.check(0) == first.manifest
    model = nn.Linear(3, 2)
    with pytest.raises(CheckpointMismatch, match="is not in the checkpoint"):
        CheckpointSaver(catalog, model, torch.optim.AdamW(model.parameters())).load(catalog, 0)
