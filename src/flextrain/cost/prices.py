"""What a node costs per hour, since when, and who says so; and money that adds up.

Money is whole nanodollars and time whole microseconds: sums are exact, and what is shown is rounded once, at the end.
"""

from dataclasses import dataclass
from datetime import date
from decimal import Decimal

from flextrain.config.schema import CostConfig
from flextrain.errors import CostError

NANO_PER_USD = 10**9
MICROS_PER_H = 3600 * 10**6


@dataclass(frozen=True)
class Quote:
    """The price of one node type. `usd_per_h` is what is paid: that of `capacity`, spot or on_demand."""

    instance_type: str
    capacity: str
    usd_per_h: float
    on_demand_usd_per_h: float
    as_of: date
    source: str


def quote_price(config: CostConfig) -> Quote:
    """The newest row of the price table for the configured node type.

    Raises CostError where the table has none.
    """
    rows = [price for price in config.prices if price.instance_type == config.instance_type]
    if not rows:
        known = ", ".join(sorted({price.instance_type for price in config.prices})) or "none"
        raise CostError(
            f"no price for instance type {config.instance_type!r}; cost.prices has {known}",
            number=1,
            remedy="add a dated row for it to cost.prices, or set cost.instance_type to one that is there",
        )
    row = max(rows, key=lambda price: price.as_of)
    paid = row.spot_usd_per_h if config.capacity == "spot" else row.on_demand_usd_per_h
    return Quote(row.instance_type, config.capacity, paid, row.on_demand_usd_per_h, row.as_of, row.source)


def cost_nanousd(node_us: int, usd_per_h: float) -> int:
    """The price of `node_us` node-microseconds in nanodollars, rounded to the nearest.

    The rate is taken as the decimal number it was written as (0.096, not its nearest binary fraction).
    """
    nanousd_per_h = int(Decimal(str(usd_per_h)) * NANO_PER_USD)
    return (node_us * nanousd_per_h + MICROS_PER_H // 2) // MICROS_PER_H
