"""The whole evaluation of a checkpoint, and the report that is passed on."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from flextrain.checkpoint import Catalog, CheckpointSaver, Keep
from flextrain.config import Config
from flextrain.data import TokenIndexFile
from flextrain.errors import CheckpointError, CheckpointMismatch
from flextrain.evaluate import EvalReport, evaluate, heldout
from flextrain.model import build_model, token_loss_sum
from flextrain.storage import open_store

TRAINED = Config.model_validate(
    {
        "data": {"seq_length": 24},
        "model": {"d_model": 32, "num_layers": 2, "num_heads": 2, "d_ff": 64, "positions": "learned"},
    }
)


@pytest.fixture(scope="module")
def checkpoint(index: TokenIndexFile, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, torch.nn.Module]:
    """A model that has seen the training split for some steps: its URL, and the model itself."""
    train = index.other("train")
    model = build_model(TRAINED.model, vocab_size=index.vocab_size, seq_length=24, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(150):
        windows_BT = torch.from_numpy(train.gather([(step * 8 + i) * 16 % 2600 for i in range(8)], 25))
        (token_loss_sum(model, windows_BT[:, :-1], windows_BT[:, 1:]) / 192).backward()
        optimizer.step()
        optimizer.zero_grad()
    catalog = Catalog(open_store(tmp_path_factory.mktemp("run") / "checkpoints"))
    CheckpointSaver(catalog, model, optimizer, Keep(3)).save(20, {"config": TRAINED.model_dump(mode="json")})
    return catalog.url_of(20), model


def asked(**keys: Any) -> Config:
    return Config.model_validate({"evaluation": {"sample_tokens": 8, "prompts": ["if", "naïve"], **keys}})


def test_a_checkpoint_is_evaluated_as_what_it_is(
    index: TokenIndexFile, checkpoint: tuple[str, torch.nn.Module]
) -> None:
    """The default configuration describes another model; the checkpoint knows better."""
    url, model = checkpoint
    report = evaluate(asked(), checkpoint_url=url, index=index)
    score = heldout(model, index, seq_length=24)
    assert (report.loss, report.accuracy, report.tokens) == (score.loss, score.accuracy, index.num_tokens - 1)
    assert report.step == 20
    assert report.perplexity == pytest.approx(math.exp(report.loss))
    assert report.bits_per_byte == score.bits_per_byte
    assert report.loss < report.unigram_loss < report.uniform_loss == math.log(index.vocab_size)
    assert report.accuracy > report.unigram_accuracy
    assert [sample["prompt"] for sample in report.samples] == ["if", "naïve"]
    assert all(sample["text"] for sample in report.samples)


def test_any_way_to_name_the_index_gives_the_same_report(
    index: TokenIndexFile, checkpoint: tuple[str, torch.nn.Module]
) -> None:
    reports = [
        evaluate(asked(max_tokens=100), checkpoint_url=checkpoint[0], index=named)
        for named in (index, index.url, index.other("train"))
    ]
    assert reports[0] == reports[1] == reports[2]
    assert reports[0].tokens == 100


def test_samples_can_be_left_out(index: TokenIndexFile, checkpoint: tuple[str, torch.nn.Module]) -> None:
    assert evaluate(asked(sample_tokens=0), checkpoint_url=checkpoint[0], index=index).samples == ()


def test_without_a_recorded_configuration_the_given_one_must_fit(
    index: TokenIndexFile, checkpoint: tuple[str, torch.nn.Module], tmp_path: Path
) -> None:
    model = checkpoint[1]
    catalog = Catalog(open_store(tmp_path))
    CheckpointSaver(catalog, model, torch.optim.AdamW(model.parameters()), Keep(1)).save(1, {})
    given = TRAINED.model_copy(update={"evaluation": asked(sample_tokens=0).evaluation})
    assert evaluate(given, checkpoint_url=catalog.url_of(1), index=index).step == 1
    with pytest.raises(CheckpointMismatch, match="checkpoint of another model"):
        evaluate(asked(), checkpoint_url=catalog.url_of(1), index=index)


def test_a_configuration_from_the_future_is_named(
    index: TokenIndexFile, checkpoint: tuple[str, torch.nn.Module], tmp_path: Path
) -> None:
    model = checkpoint[1]
    catalog = Catalog(open_store(tmp_path))
    saver = CheckpointSaver(catalog, model, torch.optim.AdamW(model.parameters()), Keep(1))
    saver.save(1, {"config": {"model": {"flux": 3}}})
    with pytest.raises(CheckpointMismatch, match=r"does not understand: model\.flux"):
        evaluate(asked(), checkpoint_url=catalog.url_of(1), index=index)


def test_text_of_another_tokenizer_is_refused(
    index: TokenIndexFile, checkpoint: tuple[str, torch.nn.Module], tmp_path: Path
) -> None:
    model = checkpoint[1]
    catalog = Catalog(open_store(tmp_path))
    saver = CheckpointSaver(catalog, model, torch.optim.AdamW(model.parameters()), Keep(2))
    facts = {"config": TRAINED.model_dump(mode="json")}
    saver.save(1, {**facts, "tokenizer": index.tokenizer().digest})
    saver.save(2, {**facts, "tokenizer": "0" * 64})
    assert evaluate(asked(sample_tokens=0), checkpoint_url=catalog.url_of(1), index=index).step == 1
    with pytest.raises(CheckpointMismatch, match="was trained with tokenizer 0000000000000000…"):
        evaluate(asked(), checkpoint_url=catalog.url_of(2), index=index)


def test_a_folder_without_a_checkpoint_is_named(index: TokenIndexFile, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no committed checkpoint"):
        evaluate(asked(), checkpoint_url=str(tmp_path / "step-00000001"), index=index)


REPORT = EvalReport(
    loss=4.25, perplexity=70.1, bits_per_byte=2.011, accuracy=0.25, unigram_loss=6.5, unigram_accuracy=0.05,
    uniform_loss=8.3178, tokens=262_144, step=150, samples=({"prompt": "def ", "text": "main():"},),
)  # fmt: skip


def test_a_report_survives_json() -> None:
    assert EvalReport.from_dict(json.loads(json.dumps(REPORT.to_dict()))) == REPORT


def test_a_summary_shows_figures_beside_their_baselines_and_samples_verbatim() -> None:
    lines = REPORT.summary().splitlines()
    assert lines[1].split() == ["loss", "(nats", "per", "token)", "4.2500", "6.5000", "8.3178"]
    assert lines[2].split() == ["next-token", "accuracy", "25.00%", "5.00%"]
    assert lines[4].split() == ["bits", "per", "byte", "2.011"]
    assert lines[5] == "over 262k held-out tokens"
    assert lines[-1] == "> def main():"
