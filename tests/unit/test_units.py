"""Units: what is formatted reads well, what is parsed is exact."""

from hypothesis import given
from hypothesis import strategies as st

from flextrain.units import format_bytes, format_count, format_seconds, format_usd


@given(st.integers(0, 10**14))
def test_formatted_sizes_are_within_half_a_percent(size: int) -> None:
    number, unit = format_bytes(size).split()
    scale = 1000 ** ("B", "kB", "MB", "GB", "TB").index(unit)
    assert abs(float(number) * scale - size) <= max(0.5, 0.005 * size)


def test_formats() -> None:
    assert format_seconds(3725) == "1:02:05"
    assert format_seconds(12.34) == "12.3 s"
    assert format_seconds(61) == "1:01"
    assert format_count(1_090_000) == "1.09M"
    assert format_usd(0.0312) == "$0.0312"
    assert format_usd(1234.5) == "$1,234.50"
