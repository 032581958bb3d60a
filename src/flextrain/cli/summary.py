"""What the end of a flow prints: one table, and where to look next."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flextrain.flowkit.refs import TrainRef
from flextrain.units import format_count, format_seconds, format_usd

if TYPE_CHECKING:
    from flextrain.cost.report import CostReport
    from flextrain.evaluate.report import EvalReport

Row = tuple[str, str, str]  # name, value, what it is to be seen against

GO_ON = "  and to train on, the same command again with `run --checkpoint-resume` and a larger training.max_steps"


def run_summary(run_id: str, trained: TrainRef, report: "EvalReport", cost: "CostReport") -> str:
    """The run's result as an aligned table, followed by places and commands."""
    table = _table([*_training_rows(trained, cost), *evaluation_rows(report), *_cost_rows(cost)])
    places = _table([("checkpoint", trained.checkpoint.uri, ""), ("events", trained.events_uri, "")])
    flow = f"{_interpreter()} flows/train_flow.py"
    cards = (trained.task, f"{run_id}/evaluate", f"{run_id}/cost_report")
    commands = [f"{flow} card view {task}" for task in cards]
    if cost.attempts > 1:  # each attempt left a card, and Metaflow shows one only by its hash
        commands[0] = f"{flow} card list {trained.task}, then card view with the last --hash"
    return "\n".join(
        [f"Run {run_id}", table, "", places, "", "Next:", *(f"  {command}" for command in commands), GO_ON]
    )


def _interpreter() -> str:
    """The Python that runs this, so that the commands work in a shell where nothing was activated."""
    python = Path(sys.executable)
    return os.path.relpath(python) if python.is_relative_to(Path.cwd()) else str(python)


def evaluation_summary(report: "EvalReport") -> str:
    return _table(evaluation_rows(report))


def evaluation_rows(report: "EvalReport") -> list[Row]:
    against = f"unigram {report.unigram_loss:.4f}, uniform {report.uniform_loss:.4f}"
    return [
        ("held-out loss", f"{report.loss:.4f}", f"{against} (nats per token, {format_count(report.tokens)} tokens)"),
        ("bits per byte", f"{report.bits_per_byte:.3f}", ""),
        ("perplexity", f"{report.perplexity:.2f}", ""),
        ("accuracy", f"{report.accuracy:.2%}", f"unigram {report.unigram_accuracy:.2%}"),
    ]


def _training_rows(trained: TrainRef, cost: "CostReport") -> list[Row]:
    interrupted = f"{cost.attempts} attempts, {cost.interruptions} interruptions" if cost.attempts > 1 else ""
    return [
        ("training loss", f"{trained.loss:.4f}", f"at step {trained.steps}"),
        ("attempts", str(cost.attempts), interrupted),
    ]


def _cost_rows(cost: "CostReport") -> list[Row]:
    quote = cost.quote
    node_time = format_seconds(cost.paid_us / 1e6)
    rows = [
        ("paid", format_usd(cost.paid_usd), f"{node_time} of {quote.instance_type} at {format_usd(quote.usd_per_h)}/h"),
        ("on-demand", format_usd(cost.on_demand_usd), "undisturbed, at the on-demand price"),
    ]
    if cost.usd_per_million_tokens is not None:
        rows.append(("per 1M tokens", format_usd(cost.usd_per_million_tokens), ""))
    if cost.goodput is not None:
        rows.append(("goodput", f"{cost.goodput:.1%}", "useful of all training time"))
    return rows


def _table(rows: list[Row]) -> str:
    names, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"  {name:<{names}}  {value:<{values}}  {note}".rstrip() for name, value, note in rows)
