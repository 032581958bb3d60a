from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flextrain.config import Config
from flextrain.elastic.spec import AgentSpec
from flextrain.flowkit import CheckpointRef, IndexRef, Launch, TrainRef, gang

INDEX = IndexRef("/data/index", "d1")
RESULT = {
    "loss": 2.5,
    "step": 150,
    "tokens": 9,
    "checkpoint": {"url": "/r/e/17/checkpoints/step-00000150", "step": 150, "digest": "d2"},
    "events_url": "/r/e/17/events",
}


class Card:
    def __init__(self) -> None:
        self.components: list[Any] = []

    def append(self, component: Any, id: str | None = None) -> None:
        self.components.append(component)

    def refresh(self) -> None:
        pass


def task(node: int = 0, attempt: int = 0) -> Any:
    parallel = SimpleNamespace(node_index=node, num_nodes=3, main_ip="10.0.0.7", control_task_id="3")
    return SimpleNamespace(
        run_id="17", step_name="train", retry_count=attempt, parallel=parallel, card={"training": Card()}
    )


def test_a_node_of_the_gang_becomes_an_agents_part(tmp_path: Path) -> None:
    spec = gang.agent_spec(Config(), Launch(f"{tmp_path}/e", 3, "spot", "ckpt"), INDEX, task(node=2, attempt=4))
    assert (spec.node, spec.num_nodes, spec.attempt, spec.main_host) == (2, 3, 4, "10.0.0.7")
    assert (spec.run_root, spec.run_id, spec.resume_from) == (f"{tmp_path}/e/17", "17", "ckpt")
    assert Config.model_validate(spec.config) == Config()


def test_a_pod_is_one_life_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch("/r/e", 3, "spot")
    monkeypatch.setenv("METAFLOW_KUBERNETES_POD_ID", "pod-1")
    assert gang.agent_spec(Config(), launch, INDEX, task()).incarnation == "pod-1"
    monkeypatch.delenv("METAFLOW_KUBERNETES_POD_ID")
    lives = {gang.agent_spec(Config(), launch, INDEX, task()).incarnation for _ in range(5)}
    assert len(lives) == 5


@pytest.mark.parametrize("node", [0, 1])
def test_every_node_hands_on_what_its_agent_reported(
    node: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[AgentSpec] = []

    def run_agent(spec: AgentSpec, on_tick: Any = None) -> dict[str, Any]:
        seen.append(spec)
        return RESULT

    monkeypatch.setattr(gang, "run_agent", run_agent)
    current = task(node=node)
    trained = gang.train_node(Config(), Launch(f"{tmp_path}/e", 3, "spot"), INDEX, current)
    checkpoint = CheckpointRef("/r/e/17/checkpoints/step-00000150", 150, "d2")
    assert trained == TrainRef(checkpoint, 2.5, 150, "/r/e/17/events", f"{tmp_path}/e/17", "17/train/3")
    assert seen[0].node == node
    assert len(current.card["training"].components) == (4 if node == 0 else 1)
