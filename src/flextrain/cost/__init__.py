"""What a run cost: prices, the ledger of node-seconds, and the report that multiplies them."""

from flextrain.cost.ledger import Ledger, read_ledger
from flextrain.cost.prices import Quote, quote_price
from flextrain.cost.report import CostReport, build_report

__all__ = ["CostReport", "Ledger", "Quote", "build_report", "quote_price", "read_ledger"]
