"""Units: what is formatted reads well, what is parsed is exact."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flextrain.units import format_bytes, format_count, format_seconds, format_usd, parse_bytes, parse_seconds


@pytest.mark.parametrize(
    ("text", "size"), [("16MiB", 16 << 20), ("1.5 kB", 1500), ("2g", 2 * 10**9), (7, 7), ("1e3", 1000)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("1.5h", 5400), ("2 min", 120), ("250ms", 0.25), (20, 20)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "fast", "5 parsecs", "-3s", "1.2.3"])
def test_nonsense_is_refused_with_the_units_there_are(text: str) -> None:
    with pytest.raises(ValueError, match="write a number and one of"):
        parse_seconds(text)


@given(st.integers(0, 10**14))
def test_formatted_sizes_are_within_half_a_percent(size: int) -> None:
    number, unit = format_bytes(size).split()
    assert abs(parse_bytes(f"{float(number)}{unit}") - size) <= max(0.5, 0.005 * size)


def test_formats() -> None:
    assert format_seconds(3725) == "1:02:05"
    assert format_seconds(12.34) == "12.3 s"
    assert format_seconds(61) == "1:01"
    assert format_count(1_090_000) == "1.09M"
    assert format_usd(0.0312) == "$0.0312"
    assert format_usd(1234.5) == "$1,234.50"
