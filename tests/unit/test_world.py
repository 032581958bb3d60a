"""The world is read from torchrun's variables, and only there."""

import pytest

from flextrain.errors import GangError
from flextrain.world import World


def test_no_variables_mean_a_world_of_one() -> None:
    assert World.detect({}) == World(0, 1, 0, 1, 0)


def test_what_environ_writes_detect_reads() -> None:
    world = World(rank=5, size=8, local_rank=1, local_size=4, node=1)
    assert World.detect(world.environ()) == world


@pytest.mark.parametrize("environ", [{"RANK": "two"}, {"RANK": "3", "WORLD_SIZE": "2"}, {"RANK": "-1"}])
def test_contradictions_are_named(environ: dict[str, str]) -> None:
    with pytest.raises(GangError) as caught:
        World.detect(environ)
    assert "RANK" in caught.value.remedy
