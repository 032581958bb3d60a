"""Where a state can be: in memory, on a node's own disk, in the store; and which of what is found to resume. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from flextrain.checkpoint.commit import Attempt
from flextrain.config.schema import CheckpointConfig


class CheckpointTier(StrEnum):
    """How far a save goes, and where a load found its state; the nearest and fastest first.

    MEMORY outlives a failed step, NVME a killed process, S3 (the store, whichever it is) the machine.
    """

    MEMORY = "memory"
    NVME = "nvme"
    S3 = "s3"


@dataclass(frozen=True)
class Route:
    """How a snapshot gets to the store: by way of the folder `nvme` on a disk of this node, or straight from memory;
    each rank sends `upload_bytes_per_s` at most."""

    nvme: str | None = None
    upload_bytes_per_s: float | None = None


def route_of(settings: CheckpointConfig, run: str = "") -> Route:
    """What a configuration asks for, with a folder for `run` on the node's disk."""
    nvme, limit = settings.nvme_path, settings.upload_limit_mb_per_s
    return Route(f"{nvme}/{run}".rstrip("/") if nvme else None, limit * 1e6 if limit else None)


STRAIGHT = Route()
NEARNESS = list(CheckpointTier)


@dataclass(frozen=True)
class Option:
    """A state that could be resumed; `attempt` tells two of one step apart, and is empty for what the store lists."""

    step: int
    tier: CheckpointTier
    attempt: str = ""


def options(
    memory: Sequence[Iterable[tuple[int, str]]],
    staged: Sequence[Iterable[tuple[Attempt, int]]],
    stored: Iterable[int],
) -> list[Option]:
    """What can be resumed, best first: the newest step, and of one step the nearest tier.

    `memory` has each rank's whole snapshots as (step, attempt): all ranks must hold one. `staged` has the parts that
    each rank finds on its node's disk, as (attempt, rank that wrote it): together they must be all of an attempt's.
    """
    in_memory = set.intersection(*(set(held) for held in memory)) if memory else set()
    parts: dict[Attempt, set[int]] = {}
    for found in staged:
        for attempt, rank in found:
            parts.setdefault(attempt, set()).add(rank)
    whole = [attempt for attempt, ranks in parts.items() if ranks >= set(range(attempt.world_size))]
    every = [
        *(Option(step, CheckpointTier.MEMORY, attempt) for step, attempt in in_memory),
        *(Option(attempt.step, CheckpointTier.NVME, attempt.name) for attempt in whole),
        *(Option(step, CheckpointTier.S3) for step in stored),
    ]
    return sorted(every, key=lambda option: (-option.step, NEARNESS.index(option.tier), option.attempt))
