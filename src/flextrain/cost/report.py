"""The cost report: node-seconds by state times a dated price, per step and per token, and what interruptions cost.

A report keeps only terms (times, counts and the quote); each figure is a property whose docstring is its formula, so
that whoever holds the JSON can recompute it. Money adds up exactly: states sum to what was paid, and so does the
waterfall.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import date
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from flextrain.config.schema import CostConfig
from flextrain.cost.ledger import OWN_STEPS, LedgerReader
from flextrain.cost.prices import MICROS_PER_H, NANO_PER_USD, Quote, cost_nanousd, quote_price
from flextrain.cost.progress import Progress, ProgressReader
from flextrain.cost.table import summary_table
from flextrain.errors import CostError
from flextrain.tracking.names import State


@dataclass(frozen=True)
class CostReport:
    """The terms: node-microseconds by state (`startup_us` of the restart time is no interruption's fault), counts of
    attempts, incarnations (lives of nodes), those killed, interruptions, steps and tokens, and the price."""

    quote: Quote
    node_us: Mapping[str, int]
    startup_us: int
    attempts: int
    incarnations: int
    killed: int
    interruptions: int
    progress: Progress

    # -- times
    @property
    def paid_us(self) -> int:
        """Sum of node_us."""
        return sum(self.node_us.values())

    @property
    def node_hours(self) -> float:
        """paid_us / 3.6e9."""
        return self.paid_us / MICROS_PER_H

    @property
    def seconds_by_state(self) -> dict[str, float]:
        """node_us / 1e6, for each state."""
        return {state: self.node_us[state] / 1e6 for state in State}

    @property
    def training_us(self) -> int:
        """paid_us without index and eval, which are steps of their own."""
        return self.paid_us - sum(self.node_us[state] for state in OWN_STEPS)

    @property
    def goodput(self) -> float | None:
        """node_us.useful / training_us."""
        return self.node_us[State.USEFUL] / self.training_us if self.training_us else None

    # -- money, in nanodollars inside and dollars outside
    @cached_property
    def _nano_by_state(self) -> dict[str, int]:
        """Each state's part of the paid sum: differences of its rounded running total, so that they sum to it."""
        running_us = accumulate((self.node_us[state] for state in State), initial=0)
        running = [cost_nanousd(us, self.quote.usd_per_h) for us in running_us]
        return {state: after - before for state, (before, after) in zip(State, pairwise(running), strict=True)}

    @property
    def usd_by_state(self) -> dict[str, float]:
        """node_us / 3.6e9 x quote.usd_per_h, for each state."""
        return {state: nano / NANO_PER_USD for state, nano in self._nano_by_state.items()}

    @property
    def paid_usd(self) -> float:
        """paid_us / 3.6e9 x quote.usd_per_h: the sum of usd_by_state."""
        return sum(self._nano_by_state.values()) / NANO_PER_USD

    @property
    def training_usd(self) -> float:
        """paid_usd without index and eval."""
        own = sum(self._nano_by_state[state] for state in OWN_STEPS)
        return (sum(self._nano_by_state.values()) - own) / NANO_PER_USD

    @property
    def usd_per_step(self) -> float | None:
        """training_usd / progress.steps."""
        return self.training_usd / self.progress.steps if self.progress.steps else None

    @property
    def usd_per_million_tokens(self) -> float | None:
        """training_usd / progress.tokens x 1e6."""
        return self.training_usd / self.progress.tokens * 1e6 if self.progress.tokens else None

    @property
    def on_demand_usd(self) -> float:
        """(paid_us - lost_us) / 3.6e9 x quote.on_demand_usd_per_h: the run on nodes that nobody takes away.

        lost_us is node_us.restart - startup_us + node_us.replay + node_us.idle.
        """
        return self._waterfall_nano["on-demand"] / NANO_PER_USD

    @property
    def lost_usd(self) -> float:
        """lost_us / 3.6e9 x quote.usd_per_h: restarts after the first start, replay and idle time."""
        return sum(self._waterfall_nano[state] for state in self._lost_us) / NANO_PER_USD

    @property
    def savings(self) -> float | None:
        """1 - paid_usd / on_demand_usd."""
        return 1 - self.paid_usd / self.on_demand_usd if self.on_demand_usd else None

    @property
    def _lost_us(self) -> dict[str, int]:
        restart_us = self.node_us[State.RESTART] - self.startup_us
        return {"restart": restart_us, "replay": self.node_us[State.REPLAY], "idle": self.node_us[State.IDLE]}

    @cached_property
    def _waterfall_nano(self) -> dict[str, int]:
        lost = {state: cost_nanousd(us, self.quote.usd_per_h) for state, us in self._lost_us.items()}
        paid = sum(self._nano_by_state.values())
        on_demand = cost_nanousd(self.paid_us - sum(self._lost_us.values()), self.quote.on_demand_usd_per_h)
        return {"on-demand": on_demand, "spot discount": paid - sum(lost.values()) - on_demand, **lost, "paid": paid}

    def waterfall(self) -> list[tuple[str, float]]:
        """(label, dollars) from what an undisturbed on-demand run would have cost to what was paid: `on-demand`, then
        signed steps (`spot discount`, `restart`, `replay`, `idle`), then `paid`, which is the sum of all before it.

        Steps of nothing are left out.
        """
        ends = ("on-demand", "paid")
        return [(label, n / NANO_PER_USD) for label, n in self._waterfall_nano.items() if n or label in ends]

    # -- in and out
    def to_dict(self) -> dict[str, Any]:
        """The terms and the figures computed from them, as JSON can hold them."""
        terms = asdict(self) | {"quote": asdict(self.quote) | {"as_of": self.quote.as_of.isoformat()}}
        return terms | {name: getattr(self, name) for name in FIGURES} | {"waterfall": [*map(list, self.waterfall())]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "CostReport":
        """The report whose `to_dict` gave `values`; only the terms are read. Raises CostError where one is missing."""
        try:
            quote = Quote(**{**values["quote"], "as_of": date.fromisoformat(values["quote"]["as_of"])})
            terms = {field.name: values[field.name] for field in fields(cls)}
            node_us = {state.value: values["node_us"][state] for state in State}
            return cls(**{**terms, "quote": quote, "node_us": node_us, "progress": Progress(**values["progress"])})
        except (KeyError, TypeError, ValueError) as error:
            raise CostError(
                f"this is no cost report: {type(error).__name__} {error}",
                number=3,
                remedy="give the JSON of a cost report of this version",
            ) from error

    def summary(self) -> str:
        """The report as an aligned table for a terminal."""
        return summary_table(self)


FIGURES = (
    *("paid_usd", "on_demand_usd", "savings", "lost_usd", "training_usd", "usd_per_step"),
    *("usd_per_million_tokens", "usd_by_state", "seconds_by_state", "node_hours", "goodput"),
)


def build_report(config: CostConfig, events: Iterable[Mapping[str, Any]]) -> CostReport:
    """What the run that wrote `events` cost, at the configured price, read line by line.

    Raises CostError where the node type has no price or there are no events.
    """
    quote, ledger_reader, progress_reader = quote_price(config), LedgerReader(), ProgressReader()
    for event in events:
        ledger_reader.add(event)
        progress_reader.add(event)
    ledger = ledger_reader.ledger()
    if not ledger.incarnations:
        raise CostError(
            "there are no events of a run", number=2, remedy="check the path of the run and that it started"
        )
    return CostReport(
        quote=quote,
        node_us={state.value: us for state, us in ledger.us_by_state.items()},
        startup_us=ledger.startup_us,
        attempts=ledger.attempts,
        incarnations=len(ledger.incarnations),
        killed=ledger.killed,
        interruptions=ledger.interruptions,
        progress=progress_reader.progress(),
    )
