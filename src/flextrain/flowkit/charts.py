"""Vega-Lite specifications as plain dicts, without `$schema`: a version other than the viewer's makes it warn."""

import math
from collections.abc import Sequence
from typing import Any

MAX_POINTS = 1000
WATERFALL_COLORS = {"level": "#4c78a8", "less": "#54a24b", "more": "#e45756"}
Point = tuple[float, float]


def downsample(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most `limit` (>= 4) points: the first, the last, and lowest and highest of each equal stretch between them.

    Extremes and not means, so that a spike in a loss curve stays visible.
    """
    if len(points) <= limit:
        return list(points)
    inner = points[1:-1]
    buckets = (limit - 2) // 2
    kept = [points[0]]
    for i in range(buckets):
        stretch = inner[i * len(inner) // buckets : (i + 1) * len(inner) // buckets]
        low, high = min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])
        kept += sorted({low, high})
    return [*kept, points[-1]]


def line_chart(points: Sequence[Point], x: str, y: str) -> dict[str, Any]:
    """One line; `x` and `y` are the axis titles. Infinity and NaN, which JSON lacks, are left out."""
    finite = [point for point in points if math.isfinite(point[1])]
    return {
        "data": {"values": [{"x": px, "y": py} for px, py in downsample(finite)]},
        "mark": {"type": "line", "point": len(finite) == 1},
        "height": 220,
        "encoding": {
            "x": {"field": "x", "type": "quantitative", "title": x, "axis": {"tickMinStep": 1}},
            "y": {"field": "y", "type": "quantitative", "title": y, "scale": {"zero": False}},
        },
    }


def bar_chart(bars: Sequence[tuple[str, float]], value: str) -> dict[str, Any]:
    """Horizontal bars in the given order; `value` is the axis title."""
    return {
        "data": {"values": [{"name": name, "value": number} for name, number in bars]},
        "mark": "bar",
        "encoding": {
            "y": {"field": "name", "type": "nominal", "title": None, "sort": None},
            "x": {"field": "value", "type": "quantitative", "title": value},
        },
    }


def waterfall(steps: Sequence[tuple[str, float]], total: str, value: str) -> dict[str, Any]:
    """Bars that start where the one before ended, the first one from zero; then their sum, named `total`, from zero."""
    rows: list[dict[str, Any]] = []
    level = 0.0
    for name, amount in steps:
        kind = "level" if not rows else "less" if amount < 0 else "more"
        rows.append({"name": name, "from": level, "to": level + amount, "kind": kind})
        level += amount
    rows.append({"name": total, "from": 0.0, "to": level, "kind": "level"})
    return {
        "data": {"values": rows},
        "mark": "bar",
        "height": 220,
        "encoding": {
            "x": {"field": "name", "type": "nominal", "title": None, "sort": None, "axis": {"labelAngle": 0}},
            "y": {"field": "from", "type": "quantitative", "title": value},
            "y2": {"field": "to"},
            "color": {
                "field": "kind",
                "type": "nominal",
                "legend": None,
                "scale": {"domain": list(WATERFALL_COLORS), "range": list(WATERFALL_COLORS.values())},
            },
        },
    }
