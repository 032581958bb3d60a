"""DistributedTrainer: any model, any dataset, any number of ranks, one trajectory."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flextrain.checkpoint import Catalog, CheckpointSaver
from flextrain.checkpoint.manifest import Manifest
from flextrain.checkpoint.recovery import nothing_sound
from flextrain.checkpoint.retention import keep_of
from flextrain.checkpoint.tiers import route_of
from flextrain.config.load import config_digest
from flextrain.config.schema import Config
from flextrain.data.loader import StepLoader
from flextrain.data.order import SampleOrder
from flextrain.elastic.place import RunPlace, open_place
from flextrain.log import get_logger, setup
from flextrain.model.loss import token_loss_sum
from flextrain.parallel import join_group, parallelize
from flextrain.parallel.ddp import settle_buckets
from flextrain.tracking import Tracker, names
from flextrain.train.agree import from_rank_0
from flextrain.train.data_plan import DataPlan, plan_data
from flextrain.train.hooks import CheckpointHook, ConsoleHook, Hook, MetricsHook, Progress, SamplesHook, StateHook
from flextrain.train.loop import run_loop
from flextrain.train.optim import build_optimizer
from flextrain.train.step import LossSum, OptimizerStep, uncounted
from flextrain.train.trackers import open_trackers
from flextrain.world import World

log = get_logger(__name__)


class DistributedTrainer:
    """Trains `model` on `train_dataset` as `config` says; checkpoints, resumes and records by itself.

    `model` is any nn.Module that maps token ids (B, T) to logits (B, T, V) or to an object with `.logits`;
    `train_dataset` any map-style dataset of token tensors or dicts with `input_ids`; `loss_sum(model, input_ids_BT,
    labels_BT)` returns the summed loss of a micro-batch. `hooks` are called after our own. Started by torchrun or
    `flextrain train` it joins its peers through `store` or torchrun's variables; in a notebook it is a world of one.
    Every step reseeds torch's global generator from (seed, step, rank), so that a resumed run draws the same dropout.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        train_dataset: Any,
        *,
        loss_sum: LossSum = token_loss_sum,
        hooks: Sequence[Hook] = (),
        place: RunPlace | None = None,
        store: dist.Store | None = None,
        blank: bool = False,
    ) -> None:
        """A `blank` model's weights are whatever memory held: nothing but a checkpoint makes it fit for training."""
        self.config, self.world = config, World.detect()
        setup(self.world)
        self.device = join_group(self.world, config.distributed, store)
        self.place = place or replace(from_rank_0(self.world, lambda: open_place(config)), node=self.world.node)
        self.model, self._blank = model, blank
        self._dataset, self._loss_sum, self._hooks = train_dataset, loss_sum, tuple(hooks)
        self._saver: CheckpointSaver | None = None  # of the last `train`, whose snapshots the next one may go on from
        self._parallel = parallelize(model, config, self.world, self.device)

    def train(
        self, epochs: float | None = None, *, batch_size: int | None = None, learning_rate: float | None = None
    ) -> dict[str, Any]:
        """Train to the end; returns `loss` (nats per token, of the last step), `step`, `tokens` and `checkpoint`.

        Arguments override training.epochs, batch_size and learning_rate. Raises DataError or CheckpointMismatch before
        the first step, and CheckpointError where a save fails.
        """
        given = {"epochs": epochs, "batch_size": batch_size, "learning_rate": learning_rate}
        for key, value in given.items():
            if value is not None:
                setattr(self.config.training, key, value)
        tracker = open_trackers(self.config, self.place, self.world)
        status = "failed"
        try:
            progress = self._train(tracker)
            status = "finished"
        finally:
            tracker.close(status)
        return {
            "loss": progress.loss,
            "step": progress.step,
            "tokens": progress.tokens,
            "checkpoint": progress.checkpoint,
        }

    def _train(self, tracker: Tracker) -> Progress:
        optimizer = build_optimizer(self._parallel.plain, self.config.training)
        self._saver = saver = self._make_saver(optimizer)
        saver.claim()
        resumed = self._resume(saver)
        saved = resumed[0].state if resumed else {}
        plan = plan_data(self.config, self._dataset, self.world.size, saved.get("data"))
        progress = Progress(
            step=resumed[0].step if resumed else 0,
            last_step=plan.last_step(self.config),
            tokens=saved.get("tokens", 0),
            loss=saved.get("loss", float("nan")),
        )
        tracker.event(names.PLAN, begins=progress.step, last_step=progress.last_step, **plan.to_dict())
        if resumed:
            manifest, url = resumed
            if manifest.objects:
                progress.checkpoint = {"url": url, "step": manifest.step, "digest": manifest.digest}
            log.info("resumed from %s", url if manifest.objects else f"a snapshot of step {manifest.step}")
            tracker.event(names.RESUME, step=manifest.step, url=url)
        if progress.is_last:
            log.info(
                "step %d of %d is done: nothing is left to train; raise training.max_steps, or start afresh under "
                "another main.experiment_name",
                progress.step,
                progress.last_step,
            )
        rescued = resumed[0] if resumed and not resumed[0].objects else None
        loader = self._loader(plan)
        take_step = OptimizerStep(
            self._parallel, optimizer, self.config, progress.last_step, self._loss_sum, saver.hold
        )
        blank = uncounted(loader.step(progress.step))
        settle_buckets(self._parallel.module, lambda: take_step.accumulate(blank, tokens=1))
        optimizer.zero_grad(set_to_none=True)
        run_loop(progress, loader, take_step, [*self._own_hooks(saver, plan, tracker, rescued), *self._hooks])
        return progress

    def _make_saver(self, optimizer: torch.optim.Optimizer) -> CheckpointSaver:
        """What an earlier `train` left in memory is gone on with."""
        settings = self.config.checkpoint
        return CheckpointSaver(
            Catalog(self.place.checkpoints),
            self._parallel.plain,
            optimizer,
            keep_of(settings),
            route=route_of(settings, f"{self.config.main.experiment_name}/{self.place.run_id}"),
            arena=self._saver.arena if self._saver else None,
        )

    def _resume(self, saver: CheckpointSaver) -> tuple[Manifest, str] | None:
        """Load the run's newest sound checkpoint, else the one it was told to start from; (manifest, URL) of it."""
        manifest = saver.resume()
        if manifest:
            return manifest, saver.catalog.url_of(manifest.step)
        if not self.place.resume_from:
            if self._blank:
                raise nothing_sound(saver.catalog.store.url)
            return None
        return saver.resume_from(self.place.resume_from)

    def _loader(self, plan: DataPlan) -> StepLoader:
        return StepLoader(
            self._dataset,
            SampleOrder(plan.num_samples, plan.seed),
            global_batch=plan.global_batch,
            micro_batch=self.config.training.batch_size,
            world=self.world,
            device=self.device,
            start_position=plan.first,
        )

    def _own_hooks(
        self, saver: CheckpointSaver, plan: DataPlan, tracker: Tracker, rescued: Manifest | None
    ) -> list[Hook]:
        def facts(progress: Progress) -> dict[str, Any]:
            return {
                "data": plan.to_dict(),
                "position": plan.first + progress.step * plan.global_batch,
                "tokens": progress.tokens,
                "loss": progress.loss,
                "tokenizer": getattr(self._dataset, "tokenizer_digest", None),
                "rng": "torch.manual_seed of (main.seed, step, rank) before every step",
                "config": self.config.model_dump(mode="json"),
                "config_digest": config_digest(self.config),
            }

        interval = self.config.tracking.log_interval
        metrics, states = MetricsHook(tracker, interval), StateHook(tracker, self.place.replay_until)
        checkpoints = CheckpointHook(saver, self.config.checkpoint, facts, tracker, metrics, states, rescued)
        console = [ConsoleHook(interval)] if self.world.is_main else []
        return [states, SamplesHook(tracker), metrics, *console, checkpoints]
