"""The shared memory of snapshots goes when nobody holds it any more."""

import gc
import os

import torch

from flextrain.checkpoint.arena import Arena
from flextrain.checkpoint.shards import Box
from flextrain.checkpoint.snapshot import Snapshots, layout_of, slot_views


def make() -> tuple[Arena, Snapshots]:
    boxes = [Box("t", torch.arange(8), (0,), (8,))]
    arena = Arena.create(layout_of(boxes), slots=2)
    return arena, Snapshots(arena, boxes)


def exists(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_a_forgotten_arena_closes_its_descriptor() -> None:
    arena, snapshots = make()
    fd = arena.fd
    assert exists(fd)
    del arena
    gc.collect()
    assert not exists(fd)
    snapshots.take(0)  # the memory stays as long as somebody has it mapped


def test_closing_twice_closes_once() -> None:
    arena, snapshots = make()
    snapshots.take(1)
    view = slot_views(arena, 1)[0]
    arena.close()
    taken = os.open("/dev/null", os.O_RDONLY)  # most likely the same number
    arena.close()
    del arena
    gc.collect()
    assert exists(taken)
    os.close(taken)
    assert torch.equal(view, torch.arange(8))
