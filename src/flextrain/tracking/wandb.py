"""Weights & Biases beside the event log. The library is imported when a run starts, never before."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from flextrain.tracking import names
from flextrain.tracking.tracker import RunInfo

INIT_TIMEOUT_S = 30.0


class WandbTracker:
    """Tracker that logs metrics to one W&B run per run id, which later attempts go on with.

    W&B's own step counter is left alone: it only accepts growing steps and drops what is replayed after a restart.
    Curves run over `train/step` instead, with the attempt beside it, so both passes over a replayed step are kept.
    Offline, each attempt is a folder of its own below `folder`/wandb; `wandb sync --id ID FOLDER…` uploads them in
    order. Raises whatever wandb does where it is not logged in or cannot reach its server.
    """

    def __init__(self, mode: Literal["offline", "online"], project: str, folder: Path) -> None:
        self._mode, self._project, self._folder = mode, project, folder
        self._run: Any = None
        self._attempt = 0

    def start(self, run: RunInfo) -> None:
        import wandb

        self._folder.mkdir(parents=True, exist_ok=True)
        self._attempt = run.attempt
        settings = wandb.Settings(console="off", silent=True, init_timeout=INIT_TIMEOUT_S)
        wandb.setup(settings)  # before init, or a run without credentials asks for them in the middle of a gang's start
        self._run = wandb.init(
            project=self._project,
            id=run_key(run.run_id),
            name=f"{run.experiment}/{run.run_id}",
            group=run.experiment,
            mode=self._mode,
            dir=self._folder,
            config=run.config,
            resume="allow" if self._mode == "online" else None,
            settings=settings,
        )
        self._run.define_metric(names.STEP)
        self._run.define_metric("*", step_metric=names.STEP)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({names.STEP: step, names.ATTEMPT: self._attempt, **metrics})

    def event(self, name: str, /, **fields: Any) -> None:
        """W&B holds curves; what happened when is read from the event log."""

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == names.Status.FINISHED else 1)


def run_key(run_id: str) -> str:
    """The run id as W&B accepts it: no `/ \\ # ? % :`, at most 64 characters."""
    return re.sub(r"[/\\#?%:]", "-", run_id)[-64:]
