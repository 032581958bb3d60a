"""A rank that waits for a save hears that a peer is gone or has failed within seconds, not after the timeout."""

import os
import signal
from pathlib import Path

import pytest
import torch
from tests.support.ranks import run_ranks, start_ranks
from torch import nn

from flextrain.checkpoint import Catalog, CheckpointSaver
from flextrain.checkpoint.requests import Writer
from flextrain.errors import FlextrainError
from flextrain.storage import open_store
from flextrain.world import World

FAR_AWAY_S = 3600.0  # the commit's timeout: a test that waits for it fails


def saver_at(root: str) -> CheckpointSaver:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    return CheckpointSaver(Catalog(open_store(root)), model, optimizer, commit_timeout_s=FAR_AWAY_S)


def save_until_a_peer_is_killed(world: World, root: str, wait: bool) -> str:
    saver = saver_at(root)
    saver.save(1, {})
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for step in range(2, 6):  # two slots: the third waits for commits that do not come
            saver.snapshot(step, {})
            if wait:
                saver.wait()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("it saved without its peer")


@pytest.mark.parametrize("wait", [False, True])
def test_a_killed_peer_ends_the_wait(tmp_path: Path, wait: bool) -> None:
    (process, pipe), (victim, _) = start_ranks(2, save_until_a_peer_is_killed, str(tmp_path), wait)
    try:
        assert pipe.poll(60), "it waits for a dead peer"
        ok, said = pipe.recv()
        assert ok, said
    finally:
        for one in (process, victim):
            one.kill()
            one.join()
    assert Catalog(open_store(tmp_path)).steps() == [1]


def save_where_one_cannot_even_say_so(world: World, root: str) -> str:
    """Rank 1 loses its store altogether: its writer can sign off neither its part nor its error."""
    saver = saver_at(root)
    saver.save(1, {})
    if world.rank == 1:
        send = Writer.submit
        elsewhere = Path(root, "manifest")
        elsewhere.write_text("a file where a folder is needed")
        Writer.submit = lambda self, request: send(self, type(request)(**{**vars(request), "root": f"{elsewhere}/x"}))  # type: ignore[method-assign]
    with pytest.raises(FlextrainError) as caught:
        saver.save(2, {})
    return caught.value.code


def test_a_rank_that_cannot_sign_off_fails_the_save_on_all(tmp_path: Path) -> None:
    codes = run_ranks(2, save_where_one_cannot_even_say_so, str(tmp_path), timeout_s=60.0)
    assert codes[0] == "FT-CKP-014"
    assert Catalog(open_store(tmp_path)).steps() == [1]
