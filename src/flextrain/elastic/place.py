"""Where a run lives: its URL, its attempt, its events. Shared by the agent and by the trainers it starts."""

import os
import re
import time
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flextrain.checkpoint.catalog import newest_checkpoint
from flextrain.config.schema import Config
from flextrain.storage import Store, open_store
from flextrain.tracking import names
from flextrain.tracking.events import read_events


@dataclass(frozen=True)
class RunPlace:
    """One attempt of one run. Checkpoints lie below the URL `root`, events in the local folder `events`.

    `resume_from` is a checkpoint URL to start from where `root` has none of its own; `replay_until` is the highest step
    that earlier attempts recorded: up to there, work is being done again.
    """

    root: str
    events: str
    run_id: str
    attempt: int = 0
    node: int = 0
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    resume_from: str | None = None
    replay_until: int = 0

    @property
    def checkpoints(self) -> Store:
        return open_store(self.root).child("checkpoints")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def experiment_root(config: Config) -> str:
    """The URL below which all runs of an experiment lie."""
    base = config.checkpoint.storage or config.main.output_dir
    base = base if "://" in base else os.path.abspath(os.path.expanduser(base))
    return f"{base.rstrip('/')}/{config.main.experiment_name}"


def choose_run(config: Config) -> tuple[str, str]:
    """(run id, root URL): with `checkpoint.auto_resume` the run of the newest checkpoint, so that starting again goes
    on; else, or where there is none, a new one named by the time (UTC)."""
    root = experiment_root(config)
    newest = newest_checkpoint(root) if config.checkpoint.auto_resume else None
    match = re.search(r"/([^/]+)/checkpoints/step-\d+$", newest or "")
    run_id = match[1] if match else time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + uuid.uuid4().hex[:4]
    return run_id, f"{root}/{run_id}"


def open_place(config: Config) -> RunPlace:
    """The place of a run that starts, or goes on, without a flow."""
    run_id, root = choose_run(config)
    events = local_events(root, config, run_id)
    attempts, replay_until = look_back(read_events(events))
    return RunPlace(root, str(events), run_id, attempt=attempts, replay_until=replay_until)


def local_events(root: str, config: Config, run_id: str) -> Path:
    """The local folder for a run's events: below its root, or below main.output_dir where the root is remote."""
    local_root = open_store(root).local_root
    return (local_root or Path(config.main.output_dir).absolute() / config.main.experiment_name / run_id) / "events"


def look_back(events: Iterable[dict[str, Any]]) -> tuple[int, int]:
    """(number of the next attempt, highest step recorded so far) from a run's events."""
    attempts, highest = 0, 0
    for event in events:
        attempts = max(attempts, int(event["attempt"]) + 1)
        if event["kind"] == "metrics" and names.LOSS in event["metrics"]:
            highest = max(highest, int(event["step"]))
    return attempts, highest
