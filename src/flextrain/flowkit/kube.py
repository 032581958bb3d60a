"""One flow file for laptop and cluster: `@kubernetes` comes from the config, or not at all."""

from collections.abc import Mapping
from typing import Any

from metaflow import FlowMutator

# Steps that work on tokens; the others only pass refs on.
HEAVY_STEPS = frozenset({"build_index", "train", "evaluate"})
GPU_STEPS = frozenset({"train", "evaluate"})
LIGHT_CPUS, LIGHT_MEMORY_MB = 1, 2048


def pod_request(config: Mapping[str, Any], step: str) -> dict[str, Any] | None:
    """Arguments of `@kubernetes` for `step` (memory in MB), or None where the config keeps steps on this machine.

    Only the gang goes to spot nodes: the other steps are short, and losing one would start it over.
    """
    flow = config["flow"]
    if not flow["kubernetes"]:
        return None
    heavy = step in HEAVY_STEPS
    request: dict[str, Any] = {
        "cpu": flow["cpus"] if heavy else LIGHT_CPUS,
        "memory": flow["memory_mb"] if heavy else LIGHT_MEMORY_MB,
    }
    if flow["image"]:
        request["image"] = flow["image"]
    if flow["gpus"] and step in GPU_STEPS:
        request["gpu"] = flow["gpus"]
    if step == "train" and config["cost"]["capacity"] == "spot":
        request["node_selector"] = dict(flow["spot_node_selector"])
    return request


class kubernetes_from_config(FlowMutator):  # type: ignore[misc]
    """Class decorator of a flow whose Metaflow Config is called `config`."""

    def pre_mutate(self, mutable_flow: Any) -> None:
        config = dict(mutable_flow.configs)["config"]
        for name, step in mutable_flow.steps:
            request = pod_request(config, name)
            if request is not None:
                step.add_decorator("kubernetes", deco_kwargs=request)
