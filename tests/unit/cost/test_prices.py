"""The right row of the table, or an error that says what to add."""

from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flextrain.config.schema import CostConfig, Price
from flextrain.cost.prices import cost_nanousd, quote_price
from flextrain.errors import CostError


def price(instance_type: str, usd: float, as_of: date) -> Price:
    return Price(
        instance_type=instance_type,
        on_demand_usd_per_h=usd,
        spot_usd_per_h=usd / 4,
        as_of=as_of,
        source=f"quoted on {as_of}",
    )


TABLE = [price("big", 8.0, date(2026, 1, 1)), price("big", 6.0, date(2026, 6, 1)), price("big", 7.0, date(2026, 3, 1))]


def test_the_newest_row_of_the_node_type_counts() -> None:
    spot = quote_price(CostConfig(instance_type="big", capacity="spot", prices=[*TABLE, price("x", 9, date.max)]))
    assert (spot.usd_per_h, spot.on_demand_usd_per_h) == (1.5, 6.0)
    assert (spot.as_of, spot.source) == (date(2026, 6, 1), "quoted on 2026-06-01")
    assert quote_price(CostConfig(instance_type="big", capacity="on_demand", prices=TABLE)).usd_per_h == 6.0


def test_a_missing_row_names_the_rows_there_are_and_the_remedy() -> None:
    with pytest.raises(CostError, match=r"no price for instance type 'huge'; cost\.prices has big\n") as raised:
        quote_price(CostConfig(instance_type="huge", prices=TABLE))
    assert raised.value.code == "FT-CST-001"
    assert "cost.prices" in raised.value.remedy


@given(st.integers(0, 10**16), st.integers(1, 10**6))
def test_money_is_the_decimal_product_rounded_once(node_us: int, usd_per_h_in_1e4: int) -> None:
    exact = node_us * usd_per_h_in_1e4 * 10**5  # nanodollars times microseconds per hour
    assert abs(2 * (cost_nanousd(node_us, usd_per_h_in_1e4 / 10**4) * 3600 * 10**6 - exact)) <= 3600 * 10**6
