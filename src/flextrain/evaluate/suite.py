"""The whole evaluation of one checkpoint: the model it was saved from, held-out figures, baselines, samples."""

import torch
from torch import nn

from flextrain.checkpoint import load_weights
from flextrain.checkpoint.catalog import read_manifest
from flextrain.checkpoint.recorded import recorded_config
from flextrain.config import Config
from flextrain.data import TokenIndexFile
from flextrain.errors import CheckpointMismatch
from flextrain.evaluate.baselines import baselines
from flextrain.evaluate.generate import generate
from flextrain.evaluate.loss import heldout
from flextrain.evaluate.report import EvalReport
from flextrain.log import get_logger
from flextrain.model import build_model
from flextrain.storage import open_store

log = get_logger(__name__)


def evaluate(config: Config, *, checkpoint_url: str, index: TokenIndexFile | str) -> EvalReport:
    """Score a checkpoint on the held-out split of `index`, and write samples.

    The model and its sequence length are those the checkpoint records, whatever `config` says of them; what is measured
    comes from `config.evaluation`. On the GPU where there is one. Raises CheckpointError, DataError, ModelError or
    StorageError.
    """
    opened = TokenIndexFile(index, split="heldout") if isinstance(index, str) else index
    split = opened if opened.split == "heldout" else opened.other("heldout")
    manifest = read_manifest(open_store(checkpoint_url))
    _check_tokenizer(manifest.state.get("tokenizer"), split, checkpoint_url)
    trained = recorded_config(manifest, checkpoint_url) or config
    model = _load_model(trained, checkpoint_url, split)
    settings, seq_length = config.evaluation, trained.data.seq_length
    score = heldout(model, split, seq_length=seq_length, batch_size=settings.batch_size, max_tokens=settings.max_tokens)
    against = baselines(split.other("train"), split, score.tokens)
    return EvalReport(
        loss=score.loss,
        perplexity=score.perplexity,
        bits_per_byte=score.bits_per_byte,
        accuracy=score.accuracy,
        unigram_loss=against.unigram_loss,
        unigram_accuracy=against.unigram_accuracy,
        uniform_loss=against.uniform_loss,
        tokens=score.tokens,
        step=manifest.step,
        samples=_samples(model, split, config, seq_length),
    )


def _check_tokenizer(trained_with: object, split: TokenIndexFile, checkpoint_url: str) -> None:
    found = split.tokenizer().digest
    if trained_with not in (None, found):
        raise CheckpointMismatch(
            f"{checkpoint_url} was trained with tokenizer {str(trained_with)[:16]}…; {split.url} has {found[:16]}…",
            number=31,
            remedy="give the index it was trained on, or one built with the same tokenizer",
        )


def _load_model(trained: Config, checkpoint_url: str, split: TokenIndexFile) -> nn.Module:
    model = build_model(trained.model, vocab_size=split.vocab_size, seq_length=trained.data.seq_length, seed=None)
    load_weights(checkpoint_url, model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    log.info("evaluating %s on %s", checkpoint_url, device.type)
    return model.to(device)


def _samples(model: nn.Module, split: TokenIndexFile, config: Config, seq_length: int) -> tuple[dict[str, str], ...]:
    settings = config.evaluation
    if not settings.sample_tokens:
        return ()
    texts = (
        generate(
            model,
            split.tokenizer(),
            prompt,
            max_new_tokens=settings.sample_tokens,
            seq_length=seq_length,
            temperature=settings.temperature,
            top_k=settings.top_k,
            seed=config.main.seed,
        )
        for prompt in settings.prompts
    )
    return tuple({"prompt": prompt, "text": text} for prompt, text in zip(settings.prompts, texts, strict=True))
