"""The blocks that users were promised, run as they were written; only names that lead to the network are replaced."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flextrain.cli.main import build_parser
from flextrain.config import parse_config
from flextrain.data import index_builder
from flextrain.data.tokenizer import END_OF_TEXT, Tokenizer
from flextrain.tracking import read_events

OWN_OBJECTS = """\
from flextrain import Config, DistributedTrainer
config = Config(); config.training.batch_size = 32; config.training.learning_rate = 1e-4
trainer = DistributedTrainer(model=model, config=config, train_dataset=dataset)   # any nn.Module, any Dataset of token tensors or dicts
trainer.train()                                                                     # checkpoints, resumes, tracks; returns metrics with "loss"
"""  # noqa: E501
NAMES = """\
from flextrain import FSDPTrainer             # the same trainer, built from names
trainer = FSDPTrainer(model_name="meta-llama/Llama-2-7b-hf", dataset="openwebtext", num_nodes=4, checkpoint_interval=1000,
    checkpoint_config={"interval": 500, "keep_last": 3, "storage": "s3://bucket/checkpoints", "auto_resume": True})
metrics = trainer.train(epochs=3, batch_size=32, learning_rate=3e-4); metrics["loss"]
"""  # noqa: E501
DATA = """\
from flextrain.data import ResumableDataset, TokenIndexFile
index = TokenIndexFile("index.bin")
dataset = ResumableDataset(data_files=["train.jsonl"], index_file=index, tokenizer=tokenizer, seq_length=1024)
state = dataset.state_dict(); dataset.load_state_dict(state)
"""
SENTENCE = "Nodes vanish and come back; the order of samples does not change. "


def run(block: str, **names: Any) -> dict[str, Any]:
    """The names a block leaves behind."""
    exec(compile(block, "promise", "exec"), names)
    return names


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in: the promised names write below the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def texts() -> list[str]:
    return [f"{i}. " + SENTENCE * (1 + i % 7) for i in range(200)]


@pytest.fixture
def model_name(workplace: Path, texts: list[str]) -> str:
    """A folder such as the hub holds: weights, configuration and tokenizer of a very small Llama."""
    import transformers

    backend = Tokenizer.train(300, texts)
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend._backend, eos_token=END_OF_TEXT).save_pretrained(
        "hub"
    )
    config = transformers.LlamaConfig(
        vocab_size=backend.vocab_size, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained("hub")
    return str(workplace / "hub")


@pytest.mark.parametrize("as_dicts", [False, True], ids=["tensors", "dicts"])
def test_a_model_and_a_dataset_of_ones_own(as_dicts: bool) -> None:
    rows = (torch.arange(100)[:, None] + torch.arange(9)) % 50
    dataset = [{"input_ids": row} for row in rows] if as_dicts else list(rows)
    model = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 50))
    first = run(OWN_OBJECTS, model=model, dataset=dataset)["trainer"]
    assert len(first.place.checkpoints.list()) > 0
    losses = [e["metrics"]["train/loss"] for e in read_events(Path(first.place.events)) if e["kind"] == "metrics"]
    assert losses[-1] < losses[0] - 0.2

    fresh = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 50))
    second = run(OWN_OBJECTS, model=fresh, dataset=dataset)["trainer"]
    assert second.place.run_id == first.place.run_id
    assert torch.equal(fresh[1].weight, model[1].weight)
    assert second.train()["loss"] == losses[-1]


def test_a_trainer_from_names(workplace: Path, texts: list[str], model_name: str) -> None:
    text = workplace / "openwebtext.txt"
    text.write_text("\n".join(texts))
    here = {
        "meta-llama/Llama-2-7b-hf": model_name,
        "openwebtext": str(text),
        "s3://bucket/checkpoints": str(workplace / "bucket"),
    }
    block = NAMES
    for promised, local in here.items():
        block = block.replace(f'"{promised}"', repr(local))
    names = run(block)
    config = names["trainer"].config
    assert (config.checkpoint.interval, config.checkpoint.keep_last_n) == (500, 3)
    assert (config.distributed.strategy, config.training.global_batch_size) == ("fsdp", 4 * 32)
    assert 0 < names["metrics"]["loss"] < 6
    assert names["metrics"]["checkpoint"]["url"].startswith(str(workplace / "bucket"))


def test_an_index_and_a_dataset_that_resumes(texts: list[str], model_name: str) -> None:
    from transformers import AutoTokenizer

    Path("train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert index_builder.main(["train.jsonl", "-o", "index.bin", "--tokenizer", model_name]) == 0
    names = run(DATA, tokenizer=AutoTokenizer.from_pretrained(model_name))
    dataset, state = names["dataset"], names["state"]
    first = next(iter(dataset))
    assert first["input_ids"].shape == (1024,)
    assert dataset.state_dict() != state
    dataset.load_state_dict(state)
    assert torch.equal(next(iter(dataset))["input_ids"], first["input_ids"])


def test_a_checkpoint_manager_is_made_as_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    from flextrain.checkpoint import CheckpointConfig, CheckpointManager, CheckpointState, CheckpointTier

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    config = CheckpointConfig(
        checkpoint_interval=500, memory_snapshot_interval=50, nvme_path="/nvme", s3_bucket="my-bucket"
    )
    manager = CheckpointManager(config)
    assert manager.catalog.store.url == "s3://my-bucket"
    assert manager.due(500) is CheckpointTier.S3
    assert manager.due(550) is CheckpointTier.MEMORY
    assert CheckpointTier.NVME in CheckpointTier
    assert CheckpointState(step=1).step == 1


def test_a_section_takes_a_key_under_one_name() -> None:
    from flextrain.checkpoint import CheckpointConfig
    from flextrain.errors import ConfigError

    with pytest.raises(ConfigError, match="`keep_last` means `keep_last_n`, which is given as well"):
        CheckpointConfig(keep_last=1, keep_last_n=2)


def test_keys_and_their_aliases() -> None:
    config = parse_config(
        """
        main: {experiment_name: demo, output_dir: out}
        training: {batch_size: 8, lr: 1e-4, max_steps: 10, epochs: 2}
        model: {vocab_size: 512, d_model: 64, num_layers: 2, num_heads: 4}
        distributed: {strategy: zero3, mixed_precision: true, communication_pattern: auto}
        checkpoint: {checkpoint_interval: 7, keep_last: 2, s3_bucket: my-bucket, auto_resume: false}
        """
    )
    assert config.training.learning_rate == 1e-4
    assert config.distributed.mixed_precision == "bf16"
    checkpoint = config.checkpoint
    assert (checkpoint.interval, checkpoint.keep_last_n, checkpoint.storage) == (7, 2, "s3://my-bucket")


@pytest.mark.parametrize(
    "words", [["train", "config.yaml"], ["validate", "config.yaml"], ["index"], ["evaluate", "step-1", "--index", "i"]]
)
def test_commands(words: list[str]) -> None:
    assert build_parser().parse_args(words).verb == words[0]
