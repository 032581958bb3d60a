"""GPT: shapes, causality, determinism, precision, and staying plain under compile and the meta device."""

import pytest
import torch
from torch import Tensor

from flextrain.config import ModelConfig
from flextrain.errors import ModelError
from flextrain.model import GPT, build_model, count_parameters, gpt2_124m, llama_7b, tiny, transformer_blocks
from flextrain.model.gpt import rotate

VOCAB, T = 61, 12
SMALL = {"d_model": 16, "num_layers": 2, "num_heads": 2, "d_ff": 32}
LLAMA = {**SMALL, "activation": "swiglu", "tie_head": False}
GPT2 = {**SMALL, "positions": "learned", "norm": "layernorm"}
SHAPES = [pytest.param(shape, id=name) for name, shape in (("tiny", SMALL), ("llama", LLAMA), ("gpt2", GPT2))]


def make(shape: dict[str, object] = SMALL, *, seed: int = 0, **keys: object) -> GPT:
    model = build_model(ModelConfig.model_validate({**shape, **keys}), vocab_size=VOCAB, seq_length=T, seed=seed)
    assert isinstance(model, GPT)
    return model


def ids(batch: int = 3, steps: int = T) -> Tensor:
    return torch.randint(0, VOCAB, (batch, steps), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_depend_on_the_past_alone(shape: dict[str, object]) -> None:
    model, before = make(shape, dtype="fp64"), ids()
    after = before.clone()
    after[:, 7] = (after[:, 7] + 1) % VOCAB
    changed = (model(before) - model(after)).abs().amax(dim=(0, 2)) > 1e-12
    assert changed.tolist() == [False] * 7 + [True] * (T - 7)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_weight_takes_part(shape: dict[str, object]) -> None:
    model = make(shape)
    model(ids(), ids().roll(-1, 1)).backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert silent == []


def test_one_seed_gives_one_model_and_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    first, second, other = make(seed=5), make(seed=5), make(seed=6)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.head.weight, other.head.weight)


def test_fp64_is_the_same_model_in_more_digits() -> None:
    single, double = make(), make(dtype="fp64")
    assert double.head.weight.dtype == torch.float64
    torch.testing.assert_close(single(ids()).double(), double(ids()), rtol=0, atol=1e-5)


def test_initial_weights_are_those_of_gpt2() -> None:
    model = make(num_layers=8, d_model=64)
    block = model.blocks[0]
    assert block.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.attention.out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.feed_forward.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert torch.equal(model.norm.weight, torch.ones(64))


def test_head_is_tied_only_on_request() -> None:
    tied, untied = make(), make(tie_head=False)
    assert tied.head.weight is tied.embedding.weight
    assert untied.head.weight is not untied.embedding.weight
    assert count_parameters(untied) - count_parameters(tied) == VOCAB * 16


def test_a_model_made_on_the_meta_device_becomes_the_same_model() -> None:
    with torch.device("meta"):
        model = GPT(ModelConfig.model_validate(SMALL), vocab_size=VOCAB, seq_length=T)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    model.init_weights(torch.Generator().manual_seed(0))
    assert torch.equal(model(ids()), make()(ids()))


def test_a_model_made_directly_is_initialised() -> None:
    assert GPT(tiny(), vocab_size=VOCAB, seq_length=T).embedding.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_learned_positions_end_and_rotary_ones_do_not() -> None:
    assert make()(ids(1, 3 * T)).shape == (1, 3 * T, VOCAB)
    with pytest.raises(ModelError, match=r"36 tokens does not fit .* 12 learned positions") as caught:
        make(GPT2)(ids(1, 3 * T))
    assert "rotary" in caught.value.remedy


def test_rotation_makes_attention_scores_a_function_of_distance() -> None:
    q, k = torch.randn(2, 8, dtype=torch.float64)
    everywhere = rotate(torch.stack((q, k)).expand(1, 6, 1, 2, 8))
    scores = everywhere[0, :, 0, 0] @ everywhere[0, :, 0, 1].T
    for distance in range(1, 6):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert not torch.allclose(scores[1, 0], scores[2, 0])


@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_autocast_is_close_and_its_loss_is_fp32(shape: dict[str, object]) -> None:
    model, labels = make(shape), ids().roll(-1, 1)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids(), labels)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(model(ids(), labels).item(), rel=2e-3)


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_compile_whole_and_change_nothing(shape: dict[str, object]) -> None:
    plain, compiled = make(shape), make(shape)
    for block in transformer_blocks(compiled):
        block.compile(backend="aot_eager", fullgraph=True)
    losses = [model(ids(), ids().roll(-1, 1)) for model in (plain, compiled)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(compiled.embedding.weight.grad, plain.embedding.weight.grad)
    assert list(compiled.state_dict()) == list(plain.state_dict())


def test_vocabulary_may_be_padded_but_not_cut() -> None:
    assert make(vocab_size=64).vocab_size == 64
    with pytest.raises(ModelError, match="vocab_size is 60 and the tokenizer has 61") as caught:
        make(vocab_size=60)
    assert "at least 61" in caught.value.remedy


@pytest.mark.parametrize(
    ("config", "seq_length", "parameters"),
    [
        (tiny(), 256, 1_311_872),
        (gpt2_124m(), 1024, 124_373_760),  # 124,439,808 as published, less its biases, plus 47 rows of padding
        (llama_7b(), 2048, 6_738_415_616),  # LLaMA, table 2: 6.7B
    ],
)
def test_presets_have_the_published_sizes(config: ModelConfig, seq_length: int, parameters: int) -> None:
    with torch.device("meta"):
        model = GPT(config, vocab_size=config.vocab_size or 4096, seq_length=seq_length)
    assert count_parameters(model) == parameters
    assert len(transformer_blocks(model)) == config.num_layers


def test_presets_take_overrides() -> None:
    assert gpt2_124m(num_layers=2).model_dump() == gpt2_124m().model_dump() | {"num_layers": 2}
