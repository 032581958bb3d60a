"""The promise: the training trajectory does not depend on the machines.

Every world size and strategy, resumed across each other, takes the same samples in the same order and has the same
losses as one rank that was never stopped: to 1e-10 in fp64, which tells rounding from mistakes, and 1e-5 in fp32.
"""

from pathlib import Path

import numpy as np
import pytest
from tests.support.ranks import run_ranks
from tests.support.tiny import Recorder, Sequences, tiny_config, train_tiny

from flextrain.data.order import SampleOrder
from flextrain.world import World

STEPS, GLOBAL_BATCH = 100, 10
TOLERANCE = {"fp32": 1e-5, "fp64": 1e-10}
Row = tuple[int, float, list[int]]


def train(world: World, root: str, strategy: str, dtype: str, stop_after: int | None) -> list[Row]:
    recorder = Recorder(stop_after)
    config = tiny_config(model={**tiny_config().model.model_dump(), "dtype": dtype}, distributed={"strategy": strategy})
    train_tiny(root, config, [recorder])
    return recorder.rows


def merged(ranks: list[list[Row]]) -> list[Row]:
    """All ranks' rows as those of the whole world; every rank must agree on the loss to the bit."""
    rows = []
    for parts in zip(*ranks, strict=True):
        assert len({(step, loss) for step, loss, _ in parts}) == 1
        rows.append((parts[0][0], parts[0][1], [i for _, _, ids in parts for i in ids]))
    return rows


@pytest.fixture(scope="module", params=["fp32", "fp64"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Row]]:
    root = str(tmp_path_factory.mktemp("reference"))
    rows = merged(run_ranks(1, train, root, "ddp", request.param, None))
    assert [step for step, _, _ in rows] == list(range(1, STEPS + 1))
    return request.param, rows


CHAINS = {
    "2 ddp": [(2, "ddp", None)],
    "4 fsdp": [(4, "fsdp", None)],
    "1 → 2 fsdp → 3 ddp → 4 fsdp": [(1, "ddp", 25), (2, "fsdp", 50), (3, "ddp", 75), (4, "fsdp", None)],
    "4 ddp → 3 fsdp → 2 ddp → 1": [(4, "ddp", 25), (3, "fsdp", 50), (2, "ddp", 75), (1, "fsdp", None)],
    "4 hsdp → 3 zero2 → 2 hsdp": [(4, "hsdp", 25), (3, "zero2", 50), (2, "hsdp", None)],
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())
def test_any_chain_of_worlds_has_the_trajectory_of_one_rank(
    chain: list[tuple[int, str, int | None]], reference: tuple[str, list[Row]], tmp_path: Path
) -> None:
    dtype, expected = reference
    rows: list[Row] = []
    for size, strategy, stop_after in chain:
        local_size = max(1, size // 2) if strategy == "hsdp" else None
        rows += merged(run_ranks(size, train, str(tmp_path), strategy, dtype, stop_after, local_size=local_size))
    assert [row[0] for row in rows] == [row[0] for row in expected]
    worst = max(abs(got / want - 1) for (_, got, _), (_, want, _) in zip(rows, expected, strict=True))
    assert worst <= TOLERANCE[dtype], f"{dtype}: relative difference of a loss {worst:.1e}"
    order = SampleOrder(len(Sequences()), seed=0)
    assert np.array_equal([i for _, _, ids in rows for i in ids], order.ids(0, STEPS * GLOBAL_BATCH))


@pytest.mark.parametrize(("size", "strategy"), [(1, "ddp"), (2, "fsdp"), (3, "ddp"), (3, "fsdp")])
def test_a_resumed_run_on_the_same_world_is_bitwise_the_same(size: int, strategy: str, tmp_path: Path) -> None:
    whole = merged(run_ranks(size, train, str(tmp_path / "whole"), strategy, "fp32", None))
    parts: list[Row] = []
    for stop_after in (25, 75, None):
        parts += merged(run_ranks(size, train, str(tmp_path / "parts"), strategy, "fp32", stop_after))
    assert parts == whole
