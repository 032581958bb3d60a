"""The cost report as lines of text for a terminal."""

import math
from typing import TYPE_CHECKING

from flextrain.tracking.names import State
from flextrain.units import format_count, format_seconds, format_usd

if TYPE_CHECKING:
    from flextrain.cost.report import CostReport


def summary_table(report: "CostReport") -> str:
    """Where the paid time went, then the figures, each with what it rests on."""
    quote = report.quote
    head = (
        f"Cost of this run: {format_usd(report.paid_usd)}  "
        f"({format_seconds(report.paid_us / 1e6)} of node time at {format_usd(quote.usd_per_h)}/h)"
    )
    price = f"{quote.instance_type} {quote.capacity.replace('_', '-')}, as of {quote.as_of}: {quote.source}"
    return "\n".join([head, "", *_align(_states(report), "<>>>"), "", *_align(_figures(report), "<><"), "", price])


def _states(report: "CostReport") -> list[tuple[str, ...]]:
    digits = max(2, 3 - math.floor(math.log10(report.paid_usd or 1)))  # one for the column; four figures of the sum

    def row(name: str, node_us: int, usd: float) -> tuple[str, ...]:
        return name, format_seconds(node_us / 1e6), f"{node_us / (report.paid_us or 1):.1%}", f"${usd:,.{digits}f}"

    usd = report.usd_by_state
    states = [row(state, report.node_us[state], usd[state]) for state in State if report.node_us[state]]
    return [("state", "node time", "share", "cost"), *states, row("paid", report.paid_us, report.paid_usd)]


def _figures(report: "CostReport") -> list[tuple[str, ...]]:
    progress = report.progress
    replayed = f", {progress.replayed_steps} done again" if progress.replayed_steps else ""
    lives = f"{_count(report.incarnations, 'node life', 'node lives')}, {report.killed} killed"
    undisturbed = f"{format_usd(report.quote.on_demand_usd_per_h)}/h, without restarts, replay and idle time"
    return [
        ("per step", _usd(report.usd_per_step), f"{_count(progress.steps, 'step')} of training{replayed}"),
        ("per million tokens", _usd(report.usd_per_million_tokens), f"{format_count(progress.tokens)} tokens"),
        ("on-demand", format_usd(report.on_demand_usd), undisturbed),
        ("saved", _percent(report.savings), "of on-demand"),
        ("lost", format_usd(report.lost_usd), f"to {_count(report.interruptions, 'interruption')} and waiting"),
        ("goodput", _percent(report.goodput), "useful of all training time"),
        ("node-hours", f"{report.node_hours:.3g}", f"{_count(report.attempts, 'attempt')}, {lives}"),
    ]


def _align(rows: list[tuple[str, ...]], sides: str) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)] for row in rows)
    return [f"  {'  '.join(cells)}".rstrip() for cells in padded]


def _usd(value: float | None) -> str:
    return "-" if value is None else format_usd(value)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
