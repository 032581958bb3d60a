"""Snapshots that are staged on a node's own disk: loaded from there, uploaded from there, never trusted blindly."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.forked import forked_writers
from tests.support.subject import _small_chunks
from torch import nn

from flextrain.checkpoint import Catalog, CheckpointSaver
from flextrain.checkpoint.persist import SPARES
from flextrain.checkpoint.retention import Keep
from flextrain.checkpoint.saver import DEFAULT_KEEP
from flextrain.checkpoint.staging import KEPT, Staging
from flextrain.checkpoint.tiers import CheckpointTier, Route
from flextrain.errors import CheckpointError
from flextrain.storage import open_store

__all__ = ["_small_chunks"]
NVME, S3 = CheckpointTier.NVME, CheckpointTier.S3


class Node:
    """A process with a state of one number everywhere, a store and a disk."""

    def __init__(self, place: Path, keep: Keep = DEFAULT_KEEP) -> None:
        self.model, self.disk = nn.Linear(64, 64), place / "disk"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0)
        self.catalog = Catalog(open_store(place / "store"))
        self.saver = CheckpointSaver(self.catalog, self.model, self.optimizer, keep, route=Route(str(self.disk)))

    def become(self, number: float) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(number)

    @property
    def number(self) -> float:
        values = {float(value) for parameter in self.model.parameters() for value in parameter.detach().flatten()}
        assert len(values) == 1, "a mixture of states"
        return values.pop()

    def save(self, step: int, tier: CheckpointTier = S3) -> None:
        self.become(step)
        self.saver.snapshot(step, {"said": step}, tier)
        self.saver.wait()

    def resume(self) -> tuple[int, float] | None:
        """Step and number that a process finds which knows nothing."""
        self.become(-1)
        manifest = CheckpointSaver(self.catalog, self.model, self.optimizer, route=Route(str(self.disk))).resume()
        assert manifest is None or manifest.state == {"said": manifest.step}
        return (manifest.step, self.number) if manifest else None

    def data(self, step: int) -> Path:
        return next(self.disk.glob(f"step-{step:08d}/*/rank-00000.bin"))


@pytest.fixture
def node(tmp_path: Path, _small_chunks: None) -> Iterator[Node]:
    with forked_writers():
        node = Node(tmp_path)
        yield node
        node.saver.close()


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def test_a_checkpoint_lies_on_the_disk_and_in_the_store_byte_for_byte(node: Node) -> None:
    node.save(1)
    (stored,) = Path(node.catalog.folder(1).url).glob("*/rank-00000.bin")
    assert node.data(1).read_bytes() == stored.read_bytes()
    assert node.resume() == (1, 1.0)


def test_what_is_only_on_the_disk_is_resumed_where_it_is_newer(node: Node) -> None:
    node.save(1)
    node.save(2, NVME)
    assert node.catalog.steps() == [1]
    assert node.resume() == (2, 2.0)


@pytest.mark.parametrize("what", ["flip", "truncate", "remove", "forget"])
def test_a_spoilt_disk_gives_way_to_the_store(node: Node, what: str) -> None:
    node.save(1)
    data = node.data(1)
    if what == "flip":
        flip(data)
    elif what == "truncate":
        os.truncate(data, 100)
    elif what == "remove":
        data.unlink()
    else:
        data.with_suffix(".json").write_bytes(b"{}")
    assert node.resume() == (1, 1.0)


def test_a_store_that_lost_an_object_is_helped_by_the_disk(node: Node) -> None:
    node.save(1)
    next(Path(node.catalog.folder(1).url).glob("*/rank-00000.bin")).unlink()
    assert node.resume() == (1, 1.0)


def test_of_what_both_have_spoilt_an_older_state_is_resumed(node: Node) -> None:
    node.save(1)
    node.save(2)
    flip(node.data(2))
    flip(next(Path(node.catalog.folder(2).url).glob("*/rank-00000.bin")))
    assert node.resume() == (1, 1.0)


def test_half_a_staged_step_is_none(node: Node) -> None:
    node.save(1)
    node.save(2, NVME)
    node.data(2).with_suffix(".json").unlink()
    assert node.resume() == (1, 1.0)


def test_the_disk_keeps_the_newest_and_one_file_to_write_over(node: Node) -> None:
    for step in range(1, 6):
        node.save(step)
    staged = [staged.attempt.step for staged in Staging(str(node.disk)).found()]
    assert sorted(staged) == [4, 5][-KEPT:]
    assert len(list((node.disk / SPARES).iterdir())) == 1
    assert not list(node.disk.glob("step-00000001"))
    assert node.catalog.steps() == [3, 4, 5]


def test_leftovers_of_a_killed_writer_go(node: Node) -> None:
    dead = node.disk / "step-00000001" / "dead"
    dead.mkdir(parents=True)
    (dead / "rank-00000.part").write_bytes(b"half")
    (dead / "rank-00001.part").write_bytes(b"another rank's, which may be alive")
    node.save(1)
    assert [path.name for path in dead.iterdir()] == ["rank-00001.part"]


def test_a_disk_that_is_full_is_passed_by(node: Node) -> None:
    node.disk.mkdir()
    (node.disk / "step-00000001").write_text("a file where a folder is needed")
    node.save(1)
    assert node.catalog.steps() == [1]
    assert node.resume() == (1, 1.0)


def test_a_disk_must_be_a_folder_of_this_machine(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no folder of this machine"):
        Staging("memory://bucket/somewhere")


def test_saving_to_a_disk_that_is_not_there_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    saver = CheckpointSaver(Catalog(open_store(tmp_path)), model, torch.optim.SGD(model.parameters()))
    with pytest.raises(CheckpointError, match=r"set checkpoint\.nvme_path"):
        saver.snapshot(1, {}, NVME)


def test_memory_is_resumed_first_and_only_by_who_holds_it(node: Node) -> None:
    node.save(1)
    node.become(2)
    node.saver.snapshot(2, {"said": 2}, CheckpointTier.MEMORY)
    node.become(3)
    manifest = node.saver.resume()
    assert manifest
    assert (manifest.step, manifest.objects, node.number) == (2, {}, 2.0)
    assert node.resume() == (1, 1.0)


def test_many_snapshots_in_memory_take_two_slots(node: Node) -> None:
    for step in range(1, 8):
        node.become(step)
        node.saver.snapshot(step, {"said": step}, CheckpointTier.MEMORY)
    node.become(0)
    manifest = node.saver.resume()
    assert manifest
    assert (manifest.step, node.number) == (7, 7.0)
    assert not node.disk.exists()
    assert node.catalog.steps() == []


def test_a_torn_copy_has_no_label(node: Node) -> None:
    node.save(1)
    node.save(2)
    assert node.saver.arena
    held = {label["step"]: slot for slot in range(2) if (label := node.saver.arena.label(slot))}
    node.saver.arena.put_label(held[2], None)  # as while it is being written over
    manifest = node.saver.resume()
    assert manifest
    assert manifest.step == 2, "from the disk"
    assert manifest.objects, "which the store has too"


def test_of_a_step_saved_twice_the_committed_state_is_resumed(node: Node, tmp_path: Path) -> None:
    node.save(1, NVME)
    straight = CheckpointSaver(node.catalog, node.model, node.optimizer)
    node.become(5)
    straight.save(1, {"said": 1})
    straight.close()
    assert node.resume() == (1, 5.0)
