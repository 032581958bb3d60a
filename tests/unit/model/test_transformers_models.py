"""transformers models: from a folder, from a configuration alone, and what is said when that cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, GPT2Config, LlamaConfig, LlamaForCausalLM, T5Config

from flextrain.config import ModelConfig
from flextrain.errors import ModelError
from flextrain.model import build_model, token_loss_sum
from flextrain.model.loss import logits_of

VOCAB, T = 61, 16
LLAMA = LlamaConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=70,
    max_position_embeddings=64, pad_token_id=69,
)  # fmt: skip
GPT2 = GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=70, bos_token_id=69, eos_token_id=69)
BERT = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=70)
IDS = torch.randint(0, VOCAB, (2, T), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flextrain.hub.hub_reachable", lambda endpoint: False)


def saved(folder: Path, config: Any) -> str:
    config.save_pretrained(folder)
    return str(folder)


def build(name: str, *, tokens: int = VOCAB, seq_length: int = T, **keys: Any) -> Any:
    return build_model(ModelConfig(name=name, **keys), vocab_size=tokens, seq_length=seq_length, seed=0)


@pytest.mark.parametrize("config", [LLAMA, GPT2, BERT], ids=["llama", "gpt2", "bert"])
def test_a_configuration_alone_becomes_a_causal_trainable_model(tmp_path: Path, config: Any) -> None:
    model = build(saved(tmp_path, config), dtype="fp64")
    assert model.training
    assert not model.config.use_cache
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    other = IDS.clone()
    other[:, -1] = (other[:, -1] + 1) % VOCAB
    before = logits_of(model, IDS)
    assert before.shape == (2, T, VOCAB)
    torch.testing.assert_close(logits_of(model, other)[:, :-1], before[:, :-1])  # also: no dropout
    token_loss_sum(model, IDS, IDS.roll(-1, 1)).backward()
    assert model.get_input_embeddings().weight.grad.abs().sum() > 0


def test_one_seed_gives_one_model_and_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    name, state = saved(tmp_path, LLAMA), torch.get_rng_state()
    first, second = build(name), build(name)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)


def test_random_weights_take_the_vocabulary_that_is_asked_for(tmp_path: Path) -> None:
    name = saved(tmp_path, GPT2)
    model = build(name)
    assert (model.config.vocab_size, model.config.eos_token_id) == (VOCAB, None)  # token 69 is no longer there
    assert build(name, vocab_size=128).config.vocab_size == 128
    with pytest.raises(ModelError, match="knows 60 tokens and the tokenizer has 61"):
        build(name, vocab_size=60)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, LlamaForCausalLM]:
    folder = tmp_path_factory.mktemp("published")
    model = LlamaForCausalLM(LLAMA).to(torch.bfloat16)
    model.save_pretrained(folder)
    return str(folder), model


def test_published_weights_are_loaded_in_master_precision(published: tuple[str, LlamaForCausalLM]) -> None:
    name, original = published
    model = build(name, weights="pretrained")
    assert model.training
    assert model.lm_head.weight.dtype == torch.float32
    assert torch.equal(model.lm_head.weight, original.lm_head.weight.float())
    assert model.config.vocab_size == 70


def test_published_weights_do_not_stretch(published: tuple[str, LlamaForCausalLM]) -> None:
    name, _ = published
    with pytest.raises(ModelError, match="knows 70 tokens and the tokenizer has 71"):
        build(name, weights="pretrained", tokens=71)
    with pytest.raises(ModelError, match=r"vocab_size is 80 and the published weights of .* have 70"):
        build(name, weights="pretrained", vocab_size=80)


def test_weights_that_lack_a_tensor_are_refused(tmp_path: Path, published: tuple[str, LlamaForCausalLM]) -> None:
    for file in Path(published[0]).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=r"lack model\.layers\.2"):
        build(str(tmp_path), weights="pretrained")


def test_more_tokens_than_positions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"positions for 64 tokens and data\.seq_length is 65"):
        build(saved(tmp_path, GPT2), seq_length=65)


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a causal language model"):
        build(saved(tmp_path, T5Config(d_model=32, num_layers=1)))


@pytest.mark.usefixtures("offline")
def test_a_name_out_of_reach_is_an_error_at_once_and_not_a_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.getaddrinfo", lambda *args, **kwargs: pytest.fail("the network was asked"))
    with pytest.raises(ModelError, match="configuration of nobody/no-such-model cannot be loaded") as caught:
        build("nobody/no-such-model")
    assert "copy the model's folder" in caught.value.remedy
    assert caught.value.code == "FT-MOD-011"


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "some/deep/path"])
def test_a_path_that_leads_nowhere_never_asks_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flextrain.hub.hub_reachable", lambda endpoint: pytest.fail("the hub was asked"))
    with pytest.raises(ModelError, match="nothing is there"):
        build(name)


@pytest.mark.parametrize(
    ("file", "content"),
    [("config.json", b"\x00\x01 garbage"), ("config.json", b'{"model_type": "no-such-type"}'), ("other", b"")],
    ids=["garbage", "unknown type", "no config"],
)
def test_a_folder_that_is_no_model_is_named(tmp_path: Path, file: str, content: bytes) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        build(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_garbage_weights_are_named(tmp_path: Path) -> None:
    saved(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00 garbage")
    with pytest.raises(ModelError, match=r"the weights in .* cannot be loaded"):
        build(str(tmp_path), weights="pretrained")
