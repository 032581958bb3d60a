import json
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flextrain.flowkit.charts import MAX_POINTS, bar_chart, downsample, line_chart, waterfall

losses = st.lists(st.floats(-1e6, 1e6, allow_nan=False), max_size=300)


@given(losses, st.integers(4, 60))
def test_downsampling_keeps_the_limit_the_order_the_ends_and_the_extremes(values: list[float], limit: int) -> None:
    points = [(float(i), value) for i, value in enumerate(values)]
    kept = downsample(points, limit)
    assert len(kept) <= limit
    assert kept == sorted(kept, key=lambda p: p[0])
    assert set(kept) <= set(points)
    if points:
        assert (kept[0], kept[-1]) == (points[0], points[-1])
        assert max(v for _, v in kept) == max(values)
        assert min(v for _, v in kept) == min(values)


def test_a_long_curve_stays_under_the_limit() -> None:
    assert len(line_chart([(i, i % 7) for i in range(50_000)], "step", "loss")["data"]["values"]) <= MAX_POINTS


def test_a_diverged_loss_leaves_valid_json() -> None:
    spec = line_chart([(1, 2.0), (2, math.nan), (3, math.inf)], "step", "loss")
    assert json.loads(json.dumps(spec, allow_nan=False))["data"]["values"] == [{"x": 1, "y": 2.0}]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8))
def test_each_bar_of_a_waterfall_starts_where_the_one_before_ended(amounts: list[float]) -> None:
    rows = waterfall([(f"s{i}", amount) for i, amount in enumerate(amounts)], "paid", "$")["data"]["values"]
    for before, after in pairwise(rows[:-1]):
        assert after["from"] == before["to"]
    assert rows[-1]["to"] == pytest.approx(sum(amounts))
    assert rows[-1]["from"] == 0


@pytest.mark.parametrize(
    "spec", [line_chart([(0, 1)], "x", "y"), bar_chart([("a", 1.0)], "x"), waterfall([], "t", "$")]
)
def test_charts_name_no_remote_schema(spec: dict[str, object]) -> None:
    assert "http" not in json.dumps(spec)
