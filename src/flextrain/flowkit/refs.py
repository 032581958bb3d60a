"""What flow steps hand to each other: small, frozen, and pointing at data instead of holding it. Torch-free."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Launch:
    """What `start` settled: the experiment's folder or URL, the gang's size, its capacity, and where to go on from."""

    experiment_url: str
    num_nodes: int
    capacity: Literal["spot", "on_demand"]
    resume_from: str | None = None

    @property
    def storage(self) -> str:
        """The folder or URL that holds all experiments and indexes."""
        return self.experiment_url.rpartition("/")[0]

    def run_root(self, run_id: str) -> str:
        """Where that run keeps events and checkpoints."""
        return f"{self.experiment_url}/{run_id}"


@dataclass(frozen=True)
class IndexRef:
    """A token index: its folder or URL, and the sha256 of its manifest."""

    uri: str
    digest: str


@dataclass(frozen=True)
class CheckpointRef:
    """A committed checkpoint: its URL, step, and the sha256 of its manifest."""

    uri: str
    step: int
    digest: str


@dataclass(frozen=True)
class TrainRef:
    """What training left: the last checkpoint, the last step's loss (nats per token), where its events are, and the
    task (RUN/train/TASK) whose card shows the gang."""

    checkpoint: CheckpointRef
    loss: float
    steps: int
    events_uri: str
    run_root: str
    task: str
