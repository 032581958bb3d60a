"""FSDPTrainer: DistributedTrainer built from names instead of objects."""

import json
import os
from collections.abc import Mapping
from typing import Any

from flextrain.config.load import parse_config
from flextrain.config.schema import Config
from flextrain.data.index_builder import ensure_index
from flextrain.elastic.ranks import count_gpus
from flextrain.train.main import train_under_torchrun
from flextrain.world import World


class FSDPTrainer:
    """Fully sharded training of a named model on a named dataset.

    `model_name` is `gpt` (the built-in decoder) or a `transformers` name or path, whose weights and tokenizer are used;
    `dataset` is a source as in data.sources, or the name of a Hugging Face dataset. The global batch is that of
    `num_nodes` nodes, however many there are. `checkpoint_config` takes the keys of the `checkpoint` section; its
    interval wins over `checkpoint_interval`.
    """

    def __init__(
        self,
        model_name: str,
        dataset: str,
        num_nodes: int = 1,
        checkpoint_interval: int | None = None,
        checkpoint_config: Mapping[str, Any] | None = None,
        experiment_name: str = "default",
    ) -> None:
        checkpoint = dict(checkpoint_config or {})
        if checkpoint_interval and not {"interval", "checkpoint_interval"} & checkpoint.keys():
            checkpoint["interval"] = checkpoint_interval
        named: dict[str, Any] = {
            "main": {"experiment_name": experiment_name},
            "data": {"sources": [_source(dataset)]},
            "model": {"name": model_name},
            "distributed": {"strategy": "fsdp"},
            "flow": {"num_nodes": num_nodes},
            "checkpoint": checkpoint,
        }
        if model_name != "gpt":
            named["model"]["weights"] = "pretrained"
            named["data"]["tokenizer"] = model_name
        self.config: Config = parse_config(json.dumps(named), source="FSDPTrainer(...)")

    def train(self, epochs: float = 1, batch_size: int = 8, learning_rate: float = 3e-4) -> dict[str, Any]:
        """Index the dataset once, train, and return the metrics of DistributedTrainer.train.

        `batch_size` counts sequences per rank. Raises DataError or ModelError where a name leads nowhere.
        """
        world = World.detect()
        training = self.config.training
        training.epochs, training.batch_size, training.learning_rate = epochs, batch_size, learning_rate
        ranks = self.config.flow.num_nodes * max(world.local_size, count_gpus(), 1)
        training.global_batch_size = batch_size * ranks
        return train_under_torchrun(self.config, lambda: ensure_index(self.config.data, self.config.main.output_dir)[0])


def _source(dataset: str) -> str:
    """A dataset's name as a data source: what exists here or names its kind stays, anything else is on the hub."""
    known = dataset == "stdlib" or "://" in dataset or dataset.startswith("hf:") or any(c in dataset for c in "*?[")
    return dataset if known or os.path.exists(dataset) else f"hf:{dataset}"
