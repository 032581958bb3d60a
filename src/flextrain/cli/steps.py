"""The bodies of the flows' steps: one function each, called with the Metaflow Config as a mapping and with refs.

A user's mistake ends a step with a message instead of a traceback. Everything heavy is imported when a step runs.
"""

import functools
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from metaflow import current

from flextrain.cli import commands
from flextrain.cli.summary import evaluation_summary, run_summary
from flextrain.config import Config, parse_config
from flextrain.flowkit.failures import not_retried, plain_errors
from flextrain.flowkit.places import effective_config, settle
from flextrain.flowkit.refs import IndexRef, Launch, TrainRef
from flextrain.log import setup

if TYPE_CHECKING:
    from flextrain.cost.report import CostReport
    from flextrain.evaluate.report import EvalReport
    from flextrain.tracking import Tracker

Values = Mapping[str, Any]
P = ParamSpec("P")
R = TypeVar("R")


def step_body(body: Callable[P, R]) -> Callable[P, R]:
    """A function that a step consists of: it logs as our commands do, and fails as Metaflow does."""

    @functools.wraps(body)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        setup()
        return body(*args, **kwargs)

    return plain_errors(wrapped)


@plain_errors
def read_config(text: str) -> dict[str, Any]:
    """Parser of the flows' Metaflow Config: YAML text to every key of the configuration."""
    return parse_config(text, _config_name()).model_dump(mode="json")


@step_body
def start(
    values: Values, num_nodes: int = 1, use_spot_instances: bool = False, checkpoint_resume: bool = False
) -> Launch:
    """Settle where the run lives, on what capacity, and from which checkpoint it goes on; prints all three."""
    from metaflow.datastore import FlowDataStore

    launch = settle(
        values,
        num_nodes=num_nodes,
        use_spot_instances=use_spot_instances,
        datastore_root=FlowDataStore.default_storage_impl.datastore_root,
    )
    if checkpoint_resume:
        launch = replace(launch, resume_from=_newest(launch.experiment_url))
    print(f"experiment {launch.experiment_url}, {num_nodes} nodes, priced as {launch.capacity}")
    return launch


@step_body
def build_index(values: Values, launch: Launch, out: str = "") -> IndexRef:
    """Build the token index at `out` (by default beside the experiments), or find it built."""
    config = effective_config(values, launch)
    with node_time(config, launch.run_root(current.run_id), "index"):
        return commands.index(config, out or None)


@step_body
@not_retried
def train(values: Values, launch: Launch, index: IndexRef) -> TrainRef:
    """This node's part of the training. A run made by Metaflow's `resume` goes on from the run it repeats."""
    from flextrain.checkpoint import newest_checkpoint
    from flextrain.flowkit.gang import train_node

    if current.origin_run_id:
        origin = newest_checkpoint(launch.run_root(current.origin_run_id))
        launch = replace(launch, resume_from=origin or launch.resume_from)
    return train_node(effective_config(values, launch), launch, index, current)


@step_body
def evaluate(values: Values, launch: Launch, trained: TrainRef, index: IndexRef) -> "EvalReport":
    """Score the last checkpoint on held-out text, and show it on the card `evaluation`."""
    config = effective_config(values, launch)
    with node_time(config, trained.run_root, "eval") as log:
        report = _evaluate(config, trained.checkpoint.uri, index.uri)
        log.log(report.step, heldout_metrics(report))
    return report


@step_body
def evaluate_alone(values: Values, checkpoint: str, index: str) -> "EvalReport":
    """The same for a checkpoint and an index given by path or URL; no run is charged for it."""
    return _evaluate(Config.model_validate(dict(values)), checkpoint, index)


def _evaluate(config: Config, checkpoint: str, index: str) -> "EvalReport":
    from flextrain.flowkit.cards import evaluation_components

    report = commands.evaluate(config, checkpoint, index)
    current.card["evaluation"].extend(evaluation_components(report.to_dict()))
    return report


def heldout_metrics(report: "EvalReport") -> dict[str, float]:
    from flextrain.tracking import names

    return {
        names.HELDOUT_LOSS: report.loss,
        names.HELDOUT_PERPLEXITY: report.perplexity,
        names.HELDOUT_BITS_PER_BYTE: report.bits_per_byte,
        names.HELDOUT_ACCURACY: report.accuracy,
    }


@contextmanager
def node_time(config: Config, run_root: str, state: str) -> Iterator["Tracker"]:
    """Record that this node spends its time on `state` while the block runs, for the run's ledger."""
    from flextrain.elastic.place import local_events
    from flextrain.elastic.recording import recording
    from flextrain.storage import open_store
    from flextrain.tracking import AGENT_RANK, RunInfo, names

    run_id = run_root.rpartition("/")[2]
    folder = local_events(run_root, config, run_id)
    life, values = uuid.uuid4().hex[:12], config.model_dump(mode="json")
    info = RunInfo(config.main.experiment_name, run_id, current.retry_count, AGENT_RANK, 0, life, values)
    durable = open_store(run_root).child("events")
    with recording(info, folder, durable, names.State(state)) as record:
        yield record.tracker


@step_body
def cost_report(values: Values, launch: Launch, trained: TrainRef) -> "CostReport":
    """What the run cost by what its nodes did, shown on the card `cost`."""
    from flextrain.cost import build_report
    from flextrain.flowkit.cards import cost_components
    from flextrain.storage import open_store
    from flextrain.tracking import read_events

    config = effective_config(values, launch)
    report = build_report(config.cost, read_events(open_store(trained.events_uri)))
    current.card["cost"].extend(cost_components(report))
    print(report.summary())
    return report


@step_body
def end(trained: TrainRef, report: "EvalReport", cost: "CostReport") -> None:
    """Print the summary."""
    print(run_summary(current.run_id, trained, report, cost))


@step_body
def end_index(index: IndexRef) -> None:
    print(f"index   {index.uri}\ndigest  {index.digest}")


@step_body
def end_evaluation(report: "EvalReport") -> None:
    print(evaluation_summary(report))


def _newest(experiment_url: str) -> str | None:
    from flextrain.checkpoint import newest_checkpoint

    found = newest_checkpoint(experiment_url)
    print(f"going on from {found}" if found else f"no checkpoint below {experiment_url} yet: training starts afresh")
    return found


def _config_name() -> str:
    """How messages call the configuration: the file that --config names, as Metaflow hands over only its text."""
    words = sys.argv
    named = [words[i + 2] for i in range(len(words) - 2) if words[i : i + 2] == ["--config", "config"]]
    return named[-1] if named else "config"
