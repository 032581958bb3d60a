"""The agent of one node: starts the ranks, tells the ledger the node lives, and ends when they do.

In this version a failure ends the attempt: the agent raises, and whoever started it (the flow's @retry, or a person)
starts the next attempt, which resumes from the newest checkpoint.
"""

import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flextrain.config.schema import Config
from flextrain.elastic.place import RunPlace, local_events, look_back
from flextrain.elastic.ranks import RankProcesses, count_gpus
from flextrain.elastic.recording import recording
from flextrain.elastic.spec import AgentSpec, RankSpec
from flextrain.log import get_logger
from flextrain.storage import open_store
from flextrain.tracking import AGENT_RANK, RunInfo, names, read_events
from flextrain.tracking.sqlite import ingest
from flextrain.world import World

TICK_S = 0.2
log = get_logger(__name__)


def run_agent(spec: AgentSpec, on_tick: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Run this node's ranks to their end; returns what they report: `loss` (nats per token), `step`, `tokens`,
    `checkpoint` {url, step, digest} and `events_url`. `on_tick` is called several times a second meanwhile.

    Raises the error of the rank that failed, or GangError where one was killed.
    """
    config = Config.model_validate(spec.config)
    local_size = spec.ranks_per_node or config.distributed.ranks_per_node or count_gpus() or 1
    events = local_events(spec.run_root, config, spec.run_id)
    durable = open_store(spec.run_root).child("events")
    _, replay_until = look_back(read_events(durable))
    place = RunPlace(
        spec.run_root,
        str(events),
        spec.run_id,
        spec.attempt,
        spec.node,
        spec.incarnation,
        spec.resume_from,
        replay_until,
    )
    experiment = config.main.experiment_name
    info = RunInfo(experiment, spec.run_id, spec.attempt, AGENT_RANK, spec.node, spec.incarnation, spec.config)
    reports = Path(tempfile.mkdtemp(prefix="flextrain-agent-"))
    try:
        rank_spec = RankSpec(
            config=spec.config,
            index_uri=spec.index_uri,
            place=place.to_dict(),
            board=f"{spec.run_root}/rendezvous",
            board_key=spec.gang,
            main_host=spec.main_host,
            reports=str(reports),
        ).save(reports / "spec.json")
        with (
            recording(info, events, durable, names.State.RESTART) as record,
            _ranks(spec, local_size, rank_spec) as ranks,
        ):
            while ranks.running():
                record.upload()
                on_tick()
                time.sleep(TICK_S)
            on_tick()
            _ingest(spec, events)
            return {**ranks.result(), "events_url": durable.url}
    finally:
        shutil.rmtree(reports, ignore_errors=True)


def _ingest(spec: AgentSpec, events: Path) -> None:
    """Fill the run's SQLite file, for whoever asks in SQL: node 0 alone does, once its gang is done."""
    if spec.node == 0:
        try:
            ingest(events, events.parent / "events.sqlite")
        except (OSError, sqlite3.Error) as error:
            log.warning("events were not copied to SQLite: %s", error)


def _ranks(spec: AgentSpec, local_size: int, rank_spec: Path) -> RankProcesses:
    worlds = [
        World(spec.node * local_size + local, spec.num_nodes * local_size, local, local_size, spec.node)
        for local in range(local_size)
    ]
    nodes_here = spec.num_nodes if spec.main_host in ("127.0.0.1", "localhost") else 1
    threads = max(1, (os.cpu_count() or 1) // (local_size * nodes_here))
    return RankProcesses(worlds, rank_spec, rank_spec.parent, threads)
