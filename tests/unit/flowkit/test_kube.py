import pytest

from flextrain.config import Config
from flextrain.flowkit.kube import pod_request

STEPS = ["start", "build_index", "train", "join", "evaluate", "cost_report", "end"]


def cluster(capacity: str = "on_demand") -> dict[str, object]:
    flow = {"kubernetes": True, "image": "registry/flextrain:1", "gpus": 8, "cpus": 16, "memory_mb": 64000}
    return Config.model_validate({"flow": flow, "cost": {"capacity": capacity}}).model_dump(mode="json")


@pytest.mark.parametrize("step", STEPS)
def test_steps_stay_on_this_machine_unless_the_config_says_otherwise(step: str) -> None:
    assert pod_request(Config().model_dump(mode="json"), step) is None


def test_the_gang_asks_for_what_the_config_names() -> None:
    assert pod_request(cluster(), "train") == {"cpu": 16, "memory": 64000, "image": "registry/flextrain:1", "gpu": 8}


def test_only_the_gang_goes_to_spot_nodes() -> None:
    selectors = {step: (pod_request(cluster("spot"), step) or {}).get("node_selector") for step in STEPS}
    assert selectors.pop("train") == {"karpenter.sh/capacity-type": "spot"}
    assert set(selectors.values()) == {None}


def test_steps_that_only_pass_refs_take_no_gpu_and_little_memory() -> None:
    for step in ("start", "join", "cost_report", "end"):
        request = pod_request(cluster(), step)
        assert request is not None
        assert "gpu" not in request
        assert request["memory"] < 4096
