"""One node of Metaflow's gang becomes one agent."""

import os
import uuid
from typing import Any

from metaflow.cards import Markdown

from flextrain.config import Config
from flextrain.elastic.agent import run_agent
from flextrain.elastic.place import local_events
from flextrain.elastic.spec import AgentSpec
from flextrain.flowkit.cards import TrainingCard
from flextrain.flowkit.refs import CheckpointRef, IndexRef, Launch, TrainRef


def agent_spec(config: Config, launch: Launch, index: IndexRef, current: Any) -> AgentSpec:
    """This node's part, read off Metaflow's `current`. A retry is the next attempt of the same run."""
    return AgentSpec(
        config=config.model_dump(mode="json"),
        index_uri=index.uri,
        run_id=current.run_id,
        run_root=launch.run_root(current.run_id),
        attempt=current.retry_count,
        node=current.parallel.node_index,
        num_nodes=current.parallel.num_nodes,
        incarnation=os.environ.get("METAFLOW_KUBERNETES_POD_ID") or uuid.uuid4().hex[:12],
        main_host=current.parallel.main_ip,
        resume_from=launch.resume_from,
    )


def train_node(config: Config, launch: Launch, index: IndexRef, current: Any) -> TrainRef:
    """Run this node's agent to the end, with node 0 showing the gang on its card `training`.

    Raises what the agent raises: the error of the rank that failed, or GangError where one was killed.
    """
    spec = agent_spec(config, launch, index, current)
    card = current.card["training"]
    if spec.node > 0:
        card.append(Markdown(f"Node {spec.node} of {spec.num_nodes}: node 0 shows the whole gang."))
        return _train_ref(run_agent(spec), spec, current)
    events = local_events(spec.run_root, config, spec.run_id)
    training = TrainingCard(card, events, attempt=spec.attempt)
    result = run_agent(spec, on_tick=training.refresh)
    training.refresh(now=True)
    return _train_ref(result, spec, current)


def _train_ref(result: dict[str, Any], spec: AgentSpec, current: Any) -> TrainRef:
    checkpoint = result["checkpoint"]
    return TrainRef(
        checkpoint=CheckpointRef(checkpoint["url"], checkpoint["step"], checkpoint["digest"]),
        loss=result["loss"],
        steps=result["step"],
        events_uri=result["events_url"],
        run_root=spec.run_root,
        task=f"{spec.run_id}/{current.step_name}/{current.parallel.control_task_id}",
    )
