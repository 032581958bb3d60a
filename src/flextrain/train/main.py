"""One rank: `python -m flextrain.train.main SPEC.json`, started by an agent with the world in its environment."""

import json
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from flextrain.checkpoint import Catalog
from flextrain.config.schema import Config
from flextrain.data import ResumableDataset, TokenIndexFile
from flextrain.elastic.place import RunPlace, open_place
from flextrain.elastic.spec import RankSpec
from flextrain.errors import FlextrainError, GangError
from flextrain.log import get_logger, setup
from flextrain.model import build_model
from flextrain.model.stats import count_parameters, flops_per_token, training_memory_bytes
from flextrain.parallel import join_group, leave_group, resolve_strategy
from flextrain.storage import open_store
from flextrain.train.agree import from_rank_0
from flextrain.train.rendezvous import meet
from flextrain.train.trainer import DistributedTrainer
from flextrain.units import format_bytes, format_count
from flextrain.world import World

log = get_logger(__name__)

# What gloo, NCCL and the rendezvous store say when the process at the other end is gone.
LOST_PEER = re.compile(r"closed by peer|reset by peer|Broken pipe|Connection refused|recvValue|NCCL|remote process")

GLOO_PLACE = re.compile(r"\[\S*\.(?:cc|h):\d+\] ")  # where in gloo's source


def train_from_config(
    config: Config, index_uri: str, place: RunPlace, store: dist.Store | None = None
) -> dict[str, Any]:
    """Train the configured model on a token index; returns the trainer's metrics. Every rank calls it."""
    index = TokenIndexFile(index_uri)
    dataset = ResumableDataset(index_file=index, seq_length=config.data.seq_length, seed=config.main.seed)
    resumes = bool(place.resume_from or Catalog(place.checkpoints).steps())
    model = build_model(
        config.model,
        vocab_size=index.vocab_size,
        seq_length=config.data.seq_length,
        seed=None if resumes else config.main.seed,
    )
    setup(world := World.detect())
    log.info("%s", describe(model, config, world))
    return DistributedTrainer(model, config, dataset, place=place, store=store, blank=resumes).train()


def describe(model: nn.Module, config: Config, world: World) -> str:
    """What is about to be trained: parameters, arithmetic, ranks, and the memory that each needs at least."""
    strategy = "ddp" if world.size == 1 else resolve_strategy(config, model)
    memory = training_memory_bytes(
        model, strategy=strategy, world_size=world.size, ranks_per_node=world.local_size
    ).total
    flops = flops_per_token(model, config.data.seq_length)
    return (
        f"{format_count(count_parameters(model))} parameters, {format_count(flops)}FLOP a token, {world.size} ranks, "
        f"{strategy}, {format_bytes(memory)} a rank before activations"
    )


def train_under_torchrun(config: Config, build_index: Callable[[], str]) -> dict[str, Any]:
    """The same for a rank that torchrun started: rank 0 builds the index and chooses the run, and tells the others."""
    world = World.detect()
    join_group(world, config.distributed)
    try:
        index_uri, place = from_rank_0(world, lambda: (build_index(), open_place(config)))
        return {**train_from_config(config, index_uri, replace(place, node=world.node)), "index": index_uri}
    finally:
        leave_group()


def main(spec_path: str) -> int:
    """Exit status 0 with a result file, 1 with an error file that the agent turns into its own error."""
    world = World.detect()
    spec = RankSpec.load(Path(spec_path))
    reports = Path(spec.reports)
    try:
        config = Config.model_validate(spec.config)
        store = None
        if world.size > 1:
            store = meet(world, open_store(spec.board), spec.board_key, spec.main_host, config.distributed.timeout_s)
        result = train_from_config(config, spec.index_uri, RunPlace(**spec.place), store)
        _report(reports / f"result-{world.local_rank}.json", result)
        leave_group()
    except FlextrainError as error:
        _report(reports / f"error-{world.local_rank}.json", error.pack())
        return 1
    except Exception as error:
        _report(reports / f"error-{world.local_rank}.json", _explain(error, world).pack())
        return 1
    return 0


def _explain(error: Exception, world: World) -> GangError:
    """A lost peer in a sentence; anything else is unexpected, and its traceback is printed."""
    reason = f"{type(error).__name__}: {error}".split("\n")[0]
    reason = GLOO_PLACE.sub("", reason).split(". This is")[0]
    if dist.is_initialized() and LOST_PEER.search(str(error)):
        return GangError(
            f"rank {world.rank} lost a peer ({reason})",
            number=7,
            remedy="the peer's own message or the log of its node tells why; started again, training resumes",
        )
    traceback.print_exc()
    return GangError(f"rank {world.rank}: {reason}", number=6, remedy="its traceback is above")


def _report(path: Path, content: dict[str, Any]) -> None:
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(content))
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
