"""The trackers of one rank: its own event file always, Weights & Biases on rank 0 where it is switched on."""

from pathlib import Path

from flextrain.config.schema import Config
from flextrain.elastic.place import RunPlace
from flextrain.tracking import CompositeTracker, EventLog, RunInfo, Tracker, names
from flextrain.world import World


def open_trackers(config: Config, place: RunPlace, world: World) -> CompositeTracker:
    """Trackers that have begun; close them with the status in which training ended."""
    folder = Path(place.events)
    trackers: list[Tracker] = [EventLog(folder / f"rank-{world.rank:05d}.{place.incarnation}.jsonl")]
    if config.tracking.wandb != "off" and world.is_main:
        from flextrain.tracking.wandb import WandbTracker

        trackers.append(WandbTracker(config.tracking.wandb, config.tracking.wandb_project, folder.parent))
    tracker = CompositeTracker(trackers)
    tracker.start(
        RunInfo(
            experiment=config.main.experiment_name,
            run_id=place.run_id,
            attempt=place.attempt,
            rank=world.rank,
            node=place.node,
            incarnation=place.incarnation,
            config=config.model_dump(mode="json"),
        )
    )
    tracker.event(names.STATE, state="restart")
    return tracker
