"""Which samples each step takes: fixed when a run first starts, carried by its checkpoints ever after."""

from dataclasses import asdict, dataclass
from typing import Any

from flextrain.config.schema import Config
from flextrain.errors import CheckpointMismatch

REMEDY = "restore that setting, or start afresh under another main.experiment_name"


@dataclass(frozen=True)
class DataPlan:
    """Step s takes positions [first + s·global_batch, first + (s+1)·global_batch) of the order (num_samples, seed).

    `fingerprint` names the samples, where the dataset knows it.
    """

    global_batch: int
    num_samples: int
    seed: int
    first: int = 0
    fingerprint: str = ""

    def last_step(self, config: Config) -> int:
        """Optimizer steps of the whole run: training.epochs where given, else training.max_steps."""
        if config.training.epochs is not None:
            return max(1, round(config.training.epochs * self.num_samples / self.global_batch))
        assert config.training.max_steps is not None  # the schema asks for one of the two
        return config.training.max_steps

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan_data(config: Config, dataset: Any, world_size: int, saved: dict[str, Any] | None) -> DataPlan:
    """The plan of a new run, or the one a checkpoint `saved`, once it is sure that nothing it rests on has changed.

    Raises CheckpointMismatch where the data, the seed or an explicit global batch differ from the checkpoint's.
    """
    wanted = config.training.global_batch_size
    num_samples, fingerprint = len(dataset), getattr(dataset, "fingerprint", "")
    if saved is None:
        global_batch = wanted or config.training.batch_size * world_size
        first = getattr(dataset, "position", 0)
        return DataPlan(global_batch, num_samples, config.main.seed, first, fingerprint)
    plan = DataPlan(**saved)
    if wanted not in (None, plan.global_batch):
        _refuse(
            f"training.global_batch_size is {wanted}; the run was started with {plan.global_batch} sequences per step"
        )
    if num_samples != plan.num_samples:
        _refuse(f"the training data hold {num_samples} samples; the run was started on {plan.num_samples}")
    if fingerprint != plan.fingerprint:
        _refuse(f"the training data are {fingerprint}; the run was started on {plan.fingerprint}")
    if config.main.seed != plan.seed:
        _refuse(f"main.seed is {config.main.seed}; the run was started with {plan.seed}")
    return plan


def _refuse(what: str) -> None:
    raise CheckpointMismatch(what, number=8, remedy=REMEDY)
