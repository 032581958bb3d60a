"""What `start` settles for the whole run, and the configuration that every later step then works with."""

from collections.abc import Mapping
from typing import Any, Literal

from flextrain.config import Config
from flextrain.elastic.place import experiment_root
from flextrain.errors import ConfigError
from flextrain.flowkit.refs import Launch


def settle(
    values: Mapping[str, Any], *, num_nodes: int, use_spot_instances: bool = False, datastore_root: str | None = None
) -> Launch:
    """The Launch of a run with Metaflow Config `values`; `datastore_root` is where Metaflow keeps its own data.

    Runs lie below checkpoint.storage where that is set, else beside Metaflow's data where that is a bucket, so that
    every node and every later step reaches them, else below main.output_dir. Raises ConfigError.
    """
    config = Config.model_validate(dict(values))
    _check_num_nodes(num_nodes, config.flow.kubernetes)
    if config.checkpoint.storage is None and datastore_root and "://" in datastore_root:
        config.checkpoint.storage = f"{datastore_root.rstrip('/')}/flextrain"
    return Launch(experiment_root(config), num_nodes, _capacity(config, use_spot_instances))


def effective_config(values: Mapping[str, Any], launch: Launch) -> Config:
    """The configuration in `values`, with what `launch` settled put in."""
    config = Config.model_validate(dict(values))
    config.cost.capacity = launch.capacity
    config.flow.num_nodes = launch.num_nodes
    config.checkpoint.storage = launch.storage
    return config


def _capacity(config: Config, use_spot_instances: bool) -> Literal["spot", "on_demand"]:
    if use_spot_instances and config.flow.kubernetes and config.cost.capacity != "spot":
        raise ConfigError(
            "--use-spot-instances asks for spot nodes, but this flow's Kubernetes requests were made with "
            "cost.capacity: on_demand, and node selectors cannot change per run",
            number=10,
            remedy="set cost.capacity: spot in the config and run (or deploy) again",
        )
    return "spot" if use_spot_instances else config.cost.capacity


def _check_num_nodes(num_nodes: int, kubernetes: bool) -> None:
    least = 2 if kubernetes else 1  # Metaflow refuses a Kubernetes gang of one
    if num_nodes < least:
        raise ConfigError(
            f"--num-nodes {num_nodes}: expected {least} or more{' on Kubernetes' if kubernetes else ''}",
            number=11,
            remedy=f"run --num-nodes {least}, or set flow.num_nodes",
        )
