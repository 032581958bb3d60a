"""Exports load where others load theirs: transformers, safetensors and torch's DCP, whole or not at all."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from tests.support.saved import save_now
from torch import nn

from flextrain.checkpoint.dcp import FlextrainWriter
from flextrain.checkpoint.export import export_dcp, export_safetensors, split
from flextrain.config import Config
from flextrain.errors import CheckpointCorrupt, CheckpointError, CheckpointMismatch
from flextrain.model import build_model

VOCAB = 61


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flextrain.hub.hub_reachable", lambda endpoint: False)


def published(folder: Path, kind: str, *, tied: bool) -> Path:
    """A folder with the configuration of a small model, as from the hub; its vocabulary is not the run's."""
    common = {"vocab_size": 99, "tie_word_embeddings": tied, "bos_token_id": 98, "eos_token_id": 3}
    if kind == "gpt2":
        config: Any = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, **common)
    else:
        config = transformers.LlamaConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, **common
        )
    config.save_pretrained(folder)
    return folder


def checkpoint(root: Path, name: str, **model: Any) -> tuple[str, nn.Module]:
    """URL of a checkpoint of a run with a random model, and that model."""
    config = Config.model_validate({"data": {"seq_length": 12}, "model": {"name": name, **model}})
    net = build_model(config.model, vocab_size=VOCAB, seq_length=12, seed=1)
    state = {"config": config.model_dump(mode="json"), "position": 84}
    return save_now(root, net, torch.optim.AdamW(net.parameters()), 7, state), net


@pytest.mark.parametrize("max_file_bytes", [1 << 30, 6000])
@pytest.mark.parametrize(("kind", "tied"), [("gpt2", True), ("llama", True), ("llama", False)])
def test_transformers_loads_what_was_trained(tmp_path: Path, kind: str, tied: bool, max_file_bytes: int) -> None:
    source = published(tmp_path / "hub", kind, tied=tied)
    url, net = checkpoint(tmp_path / "run", str(source))
    files = export_safetensors(url, tmp_path / "out", max_file_bytes=max_file_bytes)
    assert ("model.safetensors.index.json" in files) == (max_file_bytes == 6000)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, net.eval()(ids).logits)
    body = json.loads((tmp_path / "out" / "config.json").read_text())
    assert body["vocab_size"] == VOCAB
    assert body["architectures"] == [type(loaded).__name__]
    assert body["use_cache"] is True
    assert str(tmp_path) not in (tmp_path / "out" / "config.json").read_text(), "a path of this machine is published"


def test_our_own_models_weights_have_plain_names(tmp_path: Path) -> None:
    url, net = checkpoint(tmp_path, "gpt", d_model=16, num_layers=2, num_heads=2, d_ff=32)
    assert export_safetensors(url, tmp_path / "out") == ["model.safetensors"]
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert loaded.keys() == dict(net.named_parameters()).keys()
    net.load_state_dict({name: torch.zeros_like(t) for name, t in loaded.items()}, strict=False)
    net.load_state_dict(loaded, strict=False)
    assert all(torch.equal(loaded[name], weight) for name, weight in net.named_parameters())
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata()["step"] == "7"


def test_torch_loads_the_whole_state_from_its_own_format(tmp_path: Path) -> None:
    url, net = checkpoint(tmp_path, "gpt", d_model=16, num_layers=2, num_heads=2, d_ff=32)
    assert ".metadata" in export_dcp(url, tmp_path / "out")
    weights = {name: torch.zeros_like(weight) for name, weight in net.named_parameters()}
    state: dict[str, Any] = {"model": weights, "optim": {"norm.weight.exp_avg": torch.ones(16)}, "state": ""}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert all(torch.equal(state["model"][name], weight) for name, weight in net.named_parameters())
    assert state["optim"]["norm.weight.exp_avg"].sum() == 0
    assert json.loads(state["state"])["position"] == 84


def test_what_torch_saved_through_us_is_exported_as_it_was(tmp_path: Path) -> None:
    saved = {"layers": [torch.ones(2), torch.zeros(3)], "epoch": 4}
    dcp.save(dict(saved), storage_writer=FlextrainWriter(tmp_path / "c"), no_dist=True)
    export_dcp(str(tmp_path / "c"), tmp_path / "out")
    found: dict[str, Any] = {"layers": [torch.zeros(2), torch.ones(3)], "epoch": 0}
    dcp.load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    assert found["epoch"] == 4
    assert torch.equal(found["layers"][0], torch.ones(2))
    with pytest.raises(CheckpointMismatch, match="holds no weights"):
        export_safetensors(str(tmp_path / "c"), tmp_path / "weights")


@pytest.mark.parametrize("export", [export_safetensors, export_dcp])
def test_a_damaged_checkpoint_leaves_no_half_export(tmp_path: Path, export: Any) -> None:
    url, _ = checkpoint(tmp_path, "gpt", d_model=16, num_layers=2, num_heads=2, d_ff=32)
    data = next(Path(url).glob("*/rank-00000.bin"))
    raw = bytearray(data.read_bytes())
    raw[100] ^= 1
    data.write_bytes(raw)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointCorrupt, match="differs from its hash"):
        export(url, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("export", [export_safetensors, export_dcp])
def test_nothing_that_is_there_is_overwritten(tmp_path: Path, export: Any) -> None:
    url, _ = checkpoint(tmp_path, "gpt", d_model=16, num_layers=2, num_heads=2, d_ff=32)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "model.safetensors").write_text("precious")
    (tmp_path / "file").touch()
    for out in (tmp_path / "full", tmp_path / "file", "s3://bucket/out"):
        with pytest.raises(CheckpointError, match="not a folder that an export could make"):
            export(url, out)
    assert (tmp_path / "full" / "model.safetensors").read_text() == "precious"


def test_a_configuration_that_is_not_the_weights_is_refused(tmp_path: Path) -> None:
    url, _ = checkpoint(tmp_path / "run", str(published(tmp_path / "hub", "gpt2", tied=True)))
    published(tmp_path / "hub", "llama", tied=True)
    with pytest.raises(CheckpointMismatch, match="is a checkpoint of another model"):
        export_safetensors(url, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 50), min_size=1), st.integers(1, 60))
def test_every_name_is_in_one_file_of_at_most_the_size_or_one_tensor(sizes: dict[str, int], limit: int) -> None:
    files = split(sizes, limit)
    assert [name for names in files.values() for name in names] == list(sizes)
    assert all(len(names) == 1 or sum(sizes[name] for name in names) <= limit for names in files.values())
