"""Snapshots of tensors on several devices, as far as that can be told without a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flextrain.checkpoint import gpu, snapshot
from flextrain.checkpoint.arena import Arena
from flextrain.checkpoint.shards import Box
from flextrain.checkpoint.snapshot import Snapshots, by_device, layout_of


def boxes_of(*tensors: torch.Tensor) -> list[Box]:
    return [Box(f"t{i}", tensor, (0,) * tensor.ndim, tuple(tensor.shape)) for i, tensor in enumerate(tensors)]


def test_tensors_are_told_apart_by_device() -> None:
    meta, cpu = torch.zeros(2, device="meta"), torch.zeros(3)
    assert by_device([cpu, meta, cpu]) == {torch.device("cpu"): [0, 2], torch.device("meta"): [1]}
    assert by_device([]) == {}


class FakeLane:
    """A GPU's copies as the snapshot sees them: nothing arrives before somebody waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.queue, self.changing, self.held = device, [], [], 0  # type: ignore[var-annotated]

    def copy(self, views: list[torch.Tensor], sources: list[torch.Tensor], changing: list[bool]) -> None:
        self.queue = list(zip(views, sources, strict=True))
        self.changing = changing

    def settled(self) -> bool:
        return not self.queue

    def wait(self) -> None:
        while self.queue:
            view, _ = self.queue.pop()
            view.fill_(7)

    def hold(self) -> None:
        self.held += 1


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> list[FakeLane]:
    """Meta tensors pass for those of a GPU."""
    made: list[FakeLane] = []

    def lane(device: torch.device) -> FakeLane:
        made.append(FakeLane(device))
        return made[-1]

    monkeypatch.setattr(snapshot, "Lane", lane)
    monkeypatch.setattr(snapshot, "pin", lambda *given: True)
    monkeypatch.setattr(snapshot, "GPU", "meta")
    return made


def test_a_counter_on_the_cpu_is_copied_at_once_whatever_comes_first(lanes: list[FakeLane]) -> None:
    step, weight, mean = torch.tensor(5.0), torch.zeros(4, device="meta"), torch.zeros(2, device="meta")
    for tensors in ((step, weight, mean), (weight, mean, step)):
        boxes = boxes_of(*tensors)
        arena = Arena.create(layout_of(boxes), slots=1)
        names = {id(tensor): box.name for tensor, box in zip(tensors, boxes, strict=True)}
        snapshots = Snapshots(arena, boxes, changing={names[id(mean)]})
        snapshots.take(0)
        views = dict(zip(map(id, tensors), snapshot.slot_views(arena, 0), strict=True))
        assert views[id(step)] == 5
        assert not snapshots.settled()
        assert lanes[-1].changing == [False, True]
        snapshots.hold()
        snapshots.wait()
        assert snapshots.settled()
        assert lanes[-1].held == 1
        assert torch.equal(views[id(weight)], torch.full((4,), 7.0))
    assert len(lanes) == 2


def test_other_tensors_are_watched_once_the_copy_of_the_last_is_done(lanes: list[FakeLane]) -> None:
    boxes = boxes_of(torch.zeros(4, device="meta"))
    arena = Arena.create(layout_of(boxes), slots=1)
    snapshots = Snapshots(arena, boxes)
    snapshots.take(0)
    snapshots.watch(boxes_of(torch.ones(4, device="meta")))
    assert snapshots.settled()
    assert torch.equal(snapshot.slot_views(arena, 0)[0], torch.full((4,), 7.0))


class Owner:
    pass


@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_what_was_pinned_is_released_with_its_owner(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, allowed: int
) -> None:
    pinned: list[int] = []
    forgotten: list[bool] = []

    def register(address: int, size_bytes: int, flags: int) -> int:
        if len(pinned) == allowed:
            return 2  # out of memory
        pinned.append(address)
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=pinned.remove)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(gpu, "_forget_error", lambda: forgotten.append(True))
    blocks = [torch.zeros(8), torch.zeros(8)]
    lane: Any = FakeLane(torch.device("meta"))
    lane.queue = [(blocks[0], None)]
    owner = Owner()
    assert gpu.pin(owner, blocks, [lane]) == (allowed == 2)
    assert len(pinned) == allowed
    assert ("cannot be pinned" in caplog.text) == bool(forgotten) == (allowed < 2)
    del owner
    assert pinned == []
    assert lane.settled(), "a copy under way ends before its memory is given back"
