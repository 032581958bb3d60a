"""Counting parameters, operations and bytes, and finding the repeated blocks, over our models and transformers'."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from flextrain.errors import ModelError
from flextrain.model import (
    GPT,
    count_parameters,
    flops_per_token,
    gpt2_124m,
    llama_7b,
    tiny,
    training_memory_bytes,
    transformer_blocks,
)


def on_meta(make: object, *args: object, **kwargs: object) -> nn.Module:
    with torch.device("meta"):
        return make(*args, **kwargs)


def gpt(**overrides: object) -> nn.Module:
    return on_meta(GPT, tiny(**overrides), vocab_size=100, seq_length=32)


def test_blocks_of_each_kind_of_model_are_found_in_order() -> None:
    ours = gpt()
    llama = on_meta(LlamaForCausalLM, LlamaConfig(hidden_size=32, num_hidden_layers=3, num_attention_heads=4))
    gpt2 = on_meta(GPT2LMHeadModel, GPT2Config(n_embd=32, n_layer=3, n_head=4))
    assert transformer_blocks(ours) == list(ours.blocks)
    assert transformer_blocks(llama) == list(llama.model.layers)
    assert transformer_blocks(gpt2) == list(gpt2.transformer.h)


def test_a_single_block_is_found_and_layers_inside_blocks_are_not() -> None:
    block = nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(4, 4) for _ in range(8)), "out": nn.Linear(4, 4)})
    model = nn.ModuleDict({"embedding": nn.Embedding(9, 4), "layers": nn.ModuleList([block])})
    assert transformer_blocks(model) == [block]


def test_a_model_without_repetition_has_no_blocks() -> None:
    assert transformer_blocks(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))) == []
    assert transformer_blocks(nn.Linear(4, 9)) == []


def test_tied_weights_count_once() -> None:
    assert count_parameters(gpt(tie_head=False)) - count_parameters(gpt()) == 100 * 128


def test_flops_of_gpt2_are_the_published_ones() -> None:
    model = on_meta(GPT, gpt2_124m(), vocab_size=50304, seq_length=1024)
    assert flops_per_token(model, 1024) == 854_654_976  # PaLM's convention, as in nanoGPT and llm.c


def test_flops_of_llama_are_six_per_matrix_weight_and_attention() -> None:
    model = on_meta(GPT, llama_7b(), vocab_size=32000, seq_length=2048)
    weights = count_parameters(model) - 32000 * 4096 - 65 * 4096  # less the embedding and the norms
    assert flops_per_token(model, 2048) == 6 * weights + 12 * 32 * 4096 * 2048


def test_transformers_models_count_as_ours_do() -> None:
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    theirs = on_meta(LlamaForCausalLM, LlamaConfig(vocab_size=100, **shape))
    ours = gpt(d_model=64, num_layers=2, num_heads=4, d_ff=96, activation="swiglu", tie_head=False)
    assert flops_per_token(theirs, 32) == flops_per_token(ours, 32)
    tied = on_meta(GPT2LMHeadModel, GPT2Config(vocab_size=100, n_positions=32, n_embd=128, n_layer=4, n_head=4))
    assert flops_per_token(tied, 32) == flops_per_token(gpt(), 32)


def test_flops_of_a_module_without_configuration_are_its_matrices() -> None:
    assert flops_per_token(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)), 32) == 6 * 36


@pytest.mark.parametrize(
    ("strategy", "share", "copy"),
    [
        ("ddp", 1, "none"),
        ("fsdp", 8, "two blocks"),
        ("zero3", 8, "two blocks"),
        ("hsdp", 4, "two blocks"),
        ("zero2", 8, "all"),
    ],
)
def test_memory_is_four_copies_of_a_share_and_what_is_gathered(strategy: str, share: int, copy: str) -> None:
    model = gpt()
    parameters = count_parameters(model)
    block = count_parameters(model.blocks[0])
    gathered = {"none": 0, "two blocks": parameters - 2 * block, "all": parameters}[copy]
    memory = training_memory_bytes(model, strategy=strategy, world_size=8, ranks_per_node=4)
    per_tensor = -(-parameters // share) * 4
    assert (memory.weights, memory.gradients, memory.optimizer) == (per_tensor, per_tensor, 2 * per_tensor)
    assert memory.compute_copy == 4 * gathered
    assert memory.total == 4 * per_tensor + 4 * gathered


def test_bf16_halves_the_gathered_copy_and_costs_ddp_one() -> None:
    model = gpt()
    by = {
        (s, bf16): training_memory_bytes(model, strategy=s, world_size=2, bf16=bf16).compute_copy
        for s in ("ddp", "fsdp")
        for bf16 in (False, True)
    }
    assert by["fsdp", True] * 2 == by["fsdp", False]
    assert (by["ddp", False], by["ddp", True]) == (0, 2 * count_parameters(model))


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(ModelError, match="strategy 'pipeline'"):
        training_memory_bytes(gpt(), strategy="pipeline", world_size=2)
