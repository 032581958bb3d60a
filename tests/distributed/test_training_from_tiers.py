"""Training that goes on from memory or from the node's disk: the trajectory is the same as if nothing had happened."""

import shutil
from contextlib import suppress
from pathlib import Path

from tests.support.ranks import run_ranks
from tests.support.tiny import Recorder, Sequences, Stopped, tiny_config

from flextrain.checkpoint import Catalog
from flextrain.elastic.place import RunPlace
from flextrain.errors import CheckpointError
from flextrain.model import build_model
from flextrain.storage import open_store
from flextrain.train.hooks import Hook, Progress
from flextrain.train.step import StepResult
from flextrain.train.trainer import DistributedTrainer
from flextrain.world import World

STEPS = 20
Losses = dict[int, float]


class FullBucket(Hook):
    """From `step` on the store takes nothing more."""

    def __init__(self, root: Path, step: int) -> None:
        self._store, self._step = root / "checkpoints", step

    def after_step(self, progress: Progress, result: StepResult) -> None:
        if progress.step == self._step:
            shutil.rmtree(self._store)
            self._store.write_text("a file where a folder is needed")


def make(root: Path, recorder: Hook, *hooks: Hook, **settings: object) -> DistributedTrainer:
    config = tiny_config(training={"max_steps": STEPS}, checkpoint={"interval": 8, **settings})
    model = build_model(config.model, vocab_size=61, seq_length=12, seed=0)
    place = RunPlace(root=str(root), events=f"{root}/events", run_id="tiny")
    return DistributedTrainer(model, config, Sequences(), hooks=[recorder, *hooks], place=place)


def losses(*recorders: Recorder) -> Losses:
    return {step: loss for recorder in recorders for step, loss, _ in recorder.rows}


def interrupted_twice(world: World, folder: str) -> tuple[Losses, list[int], Losses]:
    """Train, stop between two checkpoints, train again in the same process, and once more."""
    calm = Recorder()
    make(Path(folder, "calm"), calm).train()
    recorder = Recorder(stop_after=11)
    trainer = make(Path(folder, "troubled"), recorder, memory_snapshot_interval=2)
    for stop in (11, 15, None):
        recorder._stop_after = stop
        try:
            trainer.train()
        except Stopped:
            continue
    begun = [recorder.rows[0][0]]
    begun += [b for (a, *_), (b, *_) in zip(recorder.rows, recorder.rows[1:], strict=False) if b != a + 1]
    return losses(calm), begun, losses(recorder)


def test_a_train_that_is_called_again_goes_on_from_memory(tmp_path: Path) -> None:
    for calm, begun, troubled in run_ranks(2, interrupted_twice, str(tmp_path)):
        assert begun == [1, 11, 15], "from the snapshots of steps 10 and 14"
        assert troubled == calm


def in_one_process(world: World, folder: str) -> tuple[Losses, Losses, list[int]]:
    """Stop while the store is away; another process finds the last checkpoint on the disk of the node."""
    calm, first, second = Recorder(), Recorder(stop_after=17), Recorder()
    root, disk = Path(folder, "troubled"), str(Path(folder, "disk"))
    make(Path(folder, "calm"), calm).train()
    with suppress(Stopped, CheckpointError):  # whichever comes first: step 17, or word of the failed upload
        make(root, first, FullBucket(root, 12), nvme_path=disk).train()
    (root / "checkpoints").unlink()
    make(root, second, nvme_path=disk).train()
    return losses(calm), losses(first, second), [step for step, *_ in second.rows]


def test_a_process_goes_on_from_what_never_reached_the_store(tmp_path: Path) -> None:
    ((calm, troubled, again),) = run_ranks(1, in_one_process, str(tmp_path))
    assert troubled == calm
    assert again == [17, 18, 19, 20], "from step 16 on the disk"
    assert Catalog(open_store(tmp_path / "troubled" / "checkpoints")).steps() == [16, 20], (
        "which is in the store by now"
    )
