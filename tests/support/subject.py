"""A tiny training state whose every byte is a function of (seed, step): a mixture of two steps or runs shows."""

import os
import random
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flextrain.checkpoint import (
    Catalog,
    CheckpointSaver,
    Keep,
    chunks,
    exchange,
    generation,
    manifest,
    persist,
    reader,
    sources,
    transfer,
)
from flextrain.checkpoint.arena import Arena
from flextrain.checkpoint.requests import Request
from flextrain.checkpoint.shards import boxes_to_write, model_state
from flextrain.checkpoint.snapshot import Snapshots, layout_of
from flextrain.checkpoint.writer import save
from flextrain.storage import open_store

CHUNK_BYTES = 8192  # a tiny state has several
SHRUNK = (manifest, persist, chunks, sources, transfer, exchange)


def small_chunks() -> None:
    """For the life of this process: a forked one, or a test that restores them."""
    for module in SHRUNK:
        module.CHUNK_BYTES = CHUNK_BYTES  # type: ignore[attr-defined]


@pytest.fixture
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in SHRUNK:
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK_BYTES)


@pytest.fixture
def root(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder in memory, and for every tenth seed one on the disk: flushing takes most of a case's time there."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or request.node.callspec.params.get("seed", 0) % 10 == 0:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="faults-", dir=memory) as folder:
        yield Path(folder)


class Tiny(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.zeros(rows, 128))
        self.narrow = nn.Parameter(torch.zeros(33, dtype=torch.bfloat16))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


class Subject:
    """A state below `root`, saved in this process (`save`) or through a `CheckpointSaver` (`saver`)."""

    def __init__(self, root: Path | str, seed: int, keep: int = 2, timeout_s: float = 20.0) -> None:
        self.seed, self.keep, self.root, self.timeout_s = seed, keep, str(root), timeout_s
        self.gang = ""
        self.model = Tiny(rows=random.Random(seed).randrange(1, 97))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.catalog = Catalog(open_store(root))
        self.saver = CheckpointSaver(self.catalog, self.model, self.optimizer, Keep(keep), timeout_s)
        boxes = boxes_to_write(model_state(self.model))
        self.arena = Arena.create(layout_of(boxes), slots=2)
        self.snapshots = Snapshots(self.arena, boxes)

    def become(self, step: int) -> None:
        """The state as it is at `step`."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + step)
        with torch.no_grad():
            for tensor in model_state(self.model).values():
                tensor.copy_(torch.randint(-(2**15), 2**15, tensor.shape, generator=generator))

    def claim(self) -> None:
        """Take the place over, as a run does that starts there: saves from now on are of a generation of its own."""
        self.gang = generation.claim(self.catalog.store, uuid.uuid4().hex) + "-"

    def request(self, step: int, slot: int = 0, attempt: str = "") -> Request:
        """Ask for `step`, of which a snapshot is taken now."""
        self.become(step)
        self.snapshots.take(slot)
        name = attempt or f"{self.gang}{uuid.uuid4().hex}"
        return Request(self.root, slot, step, name, 0, 1, Keep(self.keep), self.timeout_s, {"step": step})

    def save(self, step: int, attempt: str = "") -> dict[str, Any]:
        """Save in this process; raises what a writer would answer."""
        return save(self.request(step, attempt=attempt), self.arena)

    def is_at(self, step: int) -> bool:
        """Whether the state is exactly that of `step`."""
        found = [tensor.clone() for tensor in model_state(self.model).values()]
        self.become(step)
        return all(torch.equal(a, b) for a, b in zip(found, model_state(self.model).values(), strict=True))

    def check(self) -> list[int]:
        """The committed steps, after reading every byte of each: it is what was saved, and nothing else."""
        steps = self.catalog.steps()
        for step in steps:
            found = self.catalog.check(step)
            reader.verify(self.catalog.folder(step), found)
            self.become(step + 1)
            self.saver.load(self.catalog, step)
            assert found.state == {"step": step}
            assert self.is_at(step), f"step {step} holds another state"
        return steps

    def resume(self) -> int | None:
        """What a new process finds: the step, whose state it then has."""
        self.become(0)
        found = CheckpointSaver(self.catalog, self.model, self.optimizer).resume()
        if found is None:
            return None
        assert found.state == {"step": found.step}
        assert self.is_at(found.step), f"resumed a state that is not that of step {found.step}"
        return found.step

    def leftovers(self) -> set[str]:
        """Files that no manifest names once everything is an hour old and one more save has cleaned up."""
        long_ago = time.time() - 7200
        root = Path(self.root)
        for path in root.rglob("*"):
            os.utime(path, (long_ago, long_ago))
        self.save(max(self.catalog.steps(), default=0) + 1)
        known = {f"step-{step:08d}/manifest.json" for step in self.catalog.steps()}
        for step in self.catalog.steps():
            attempt = self.catalog.manifest(step).attempt
            known |= {
                f"step-{step:08d}/{attempt}/{name}" for name in ("rank-00000.bin", "rank-00000.json", "verdict.json")
            }
        files = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
        return {name for name in files - known if not name.startswith((persist.SPARES, generation.FOLDER))}

    def close(self) -> None:
        self.saver.close()
        self.arena.close()
