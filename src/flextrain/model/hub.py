"""Causal language models of `transformers`, by published name or from a folder, made fit for this trainer."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flextrain.config import ModelConfig
from flextrain.errors import ModelError
from flextrain.hub import hub_session
from flextrain.log import get_logger

log = get_logger(__name__)
LOAD_REMEDY = (
    "check the name, your access to it and the network; without a network copy the model's folder here and give its "
    "path as model.name, or use model.name: gpt"
)


def build_causal_lm(config: ModelConfig, *, vocab_size: int, seq_length: int, seed: int) -> nn.Module:
    """The model `config.name` names, with fp32 (or fp64) weights, in training mode, without cache and without dropout.

    Dropout is off because its masks would differ with the number of ranks, and the trajectory must not. Code that
    comes with a model is never run. Random weights take the tokenizer's vocabulary where `config.vocab_size` is None;
    published ones keep their own. Raises ModelError, at once where the hub cannot be reached, with what to do.
    """
    hub_config = _load_config(config)
    _check_positions(config.name, hub_config, seq_length)
    if config.weights == "random":
        _set_vocabulary(hub_config, config.vocab_size or vocab_size)
    _check_vocabulary(config, hub_config, vocab_size)
    dtype = torch.float64 if config.dtype == "fp64" else torch.float32
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        make = _from_config if config.weights == "random" else _from_weights
        model = make(config.name, hub_config, dtype)
    return model.train()


def describe_causal_lm(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> nn.Module:
    """The model of a checkpoint, without memory for its weights; its `.config` is what is published beside them.

    `shapes`, of the saved weights by name, tell the vocabulary that random weights were made for. Raises ModelError as
    `build_causal_lm` does.
    """
    hub_config = _load_config(config)
    hub_config.use_cache = True  # off only in training
    model = _on_meta(config, hub_config)
    table = model.get_input_embeddings().weight
    rows = {shapes[name][0] for name, weight in model.named_parameters() if weight is table and shapes.get(name)}
    if rows - {hub_config.get_text_config().vocab_size}:
        _set_vocabulary(hub_config, rows.pop())
        model = _on_meta(config, hub_config)
    model.config.architectures = [type(model).__name__]
    described: nn.Module = model
    return described


def _on_meta(config: ModelConfig, hub_config: Any) -> Any:
    with torch.device("meta"):
        return _from_config(config.name, hub_config, torch.float64 if config.dtype == "fp64" else torch.float32)


def _load_config(config: ModelConfig) -> Any:
    from transformers import AutoConfig

    hub_config = _load(config.name, "configuration", AutoConfig.from_pretrained)
    if getattr(hub_config, "is_encoder_decoder", False):
        raise _not_causal(config.name, f"{type(hub_config).__name__} describes an encoder and a decoder")
    hub_config.use_cache = False
    hub_config.is_decoder = True  # BERT and its kin would otherwise look ahead
    _stop_dropout(config.name, hub_config.get_text_config())
    return hub_config


def _stop_dropout(name: str, text_config: Any) -> None:
    for key, value in text_config.to_dict().items():
        dropout = "dropout" in key or key.endswith(("pdrop", "layerdrop"))
        if dropout and isinstance(value, float) and value > 0:
            log.info("%s: %s %g becomes 0, so that training does not depend on the number of ranks", name, key, value)
            setattr(text_config, key, 0.0)


def _load(name: str, what: str, load: Callable[..., Any], **options: Any) -> Any:
    """`load` from a folder, or by name: from the hub where it answers, else from the cache at once."""
    folder = Path(name).expanduser()
    if folder.exists():
        return _explained(f"the {what} in {folder}", load, str(folder), local_files_only=True, **options)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(
            f"model.name {name} is a path, and nothing is there",
            number=10,
            remedy="correct the path, or write a published name such as openai-community/gpt2",
        )
    with hub_session() as offline:
        return _explained(f"the {what} of {name}", load, name, local_files_only=offline, **options)


def _explained(what: str, load: Callable[..., Any], source: str, *, local_files_only: bool, **options: Any) -> Any:
    try:
        return load(source, local_files_only=local_files_only, trust_remote_code=False, **options)
    except Exception as error:  # transformers, huggingface_hub and safetensors raise many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise ModelError(f"{what} cannot be loaded: {reason}", number=11, remedy=LOAD_REMEDY) from error


def _from_config(name: str, hub_config: Any, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModelForCausalLM

    try:
        model: nn.Module = AutoModelForCausalLM.from_config(hub_config, dtype=dtype, trust_remote_code=False)
    except ValueError as error:
        raise _not_causal(name, str(error).splitlines()[0][:200]) from error
    return model


def _from_weights(name: str, hub_config: Any, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModelForCausalLM

    load = AutoModelForCausalLM.from_pretrained
    model: nn.Module
    model, found = _load(name, "weights", load, config=hub_config, dtype=dtype, output_loading_info=True)
    if found["missing_keys"]:
        raise ModelError(
            f"the weights of {name} lack {', '.join(sorted(found['missing_keys'])[:3])}, which its configuration needs",
            number=16,
            remedy="check that configuration and weights belong together, or set model.weights: random",
        )
    return model


def _not_causal(name: str, found: str) -> ModelError:
    return ModelError(
        f"{name} is not a causal language model: {found}",
        number=12,
        remedy="choose a decoder-only model that AutoModelForCausalLM knows, or model.name: gpt",
    )


def _check_positions(name: str, hub_config: Any, seq_length: int) -> None:
    positions = getattr(hub_config.get_text_config(), "max_position_embeddings", None)
    if positions and positions < seq_length:
        raise ModelError(
            f"{name} has positions for {positions} tokens and data.seq_length is {seq_length}",
            number=13,
            remedy=f"set data.seq_length to at most {positions}",
        )


def _set_vocabulary(hub_config: Any, vocab_size: int) -> None:
    text_config = hub_config.get_text_config()
    text_config.vocab_size = vocab_size
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = getattr(text_config, key, None)
        if ids is not None and max(ids if isinstance(ids, list) else [ids]) >= vocab_size:
            setattr(text_config, key, None)  # special tokens of a vocabulary that is no longer there


def _check_vocabulary(config: ModelConfig, hub_config: Any, vocab_size: int) -> None:
    found = hub_config.get_text_config().vocab_size
    if config.vocab_size is not None and found != config.vocab_size:
        raise ModelError(
            f"model.vocab_size is {config.vocab_size} and the published weights of {config.name} have {found} tokens",
            number=14,
            remedy="leave model.vocab_size out, or set model.weights: random",
        )
    if found < vocab_size:
        raise ModelError(
            f"{config.name} knows {found} tokens and the tokenizer has {vocab_size}",
            number=15,
            remedy=f"set data.tokenizer to {config.name}, or model.weights: random",
        )
