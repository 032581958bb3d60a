"""The three cards. Data goes in, components come out; only TrainingCard holds state: it lives while training."""

import html
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import metaflow.plugins
from metaflow.cards import BlankCard, Markdown, ProgressBar, PythonCode, Table, VegaChart

from flextrain.cost import CostReport
from flextrain.flowkit.charts import bar_chart, line_chart, waterfall
from flextrain.flowkit.tail import EventTail
from flextrain.flowkit.view import RunView
from flextrain.log import get_logger
from flextrain.units import format_count, format_seconds, format_usd

CARD_TYPE = "flextrain"
REFRESH_S = 10.0  # each refresh is a process of its own, about 0.6 s of one core; Metaflow drops those under 5 s
LISTED_CHECKPOINTS = 10
_REMOTE_FONTS = re.compile(r"""@import\s*(?:url\()?["']https?://[^"']*["']\)?[^;]*;""")
log = get_logger("cards")


class OfflineCard(BlankCard):  # type: ignore[misc]
    """Metaflow's blank card without its font import, which blanks the page for 15 s where a firewall drops packets."""

    type = CARD_TYPE

    def render(self, *args: Any, **kwargs: Any) -> str:
        return _REMOTE_FONTS.sub("", str(super().render(*args, **kwargs)))


if OfflineCard not in metaflow.plugins.CARDS:
    metaflow.plugins.CARDS.append(OfflineCard)


class TrainingCard:
    """Progress, loss curve, pace, checkpoints and resumes of a running gang, read from the events its processes append.

    One card cannot be shared by tasks (Netflix/metaflow#2251), so node 0 shows the gang.
    """

    def __init__(
        self,
        card: Any,
        events: Path,
        *,
        attempt: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`card` is Metaflow's `current.card[…]`, `events` the folder of event files, `clock` gives unix seconds."""
        self._card, self._clock = card, clock
        self._tails = [EventTail(events, pattern) for pattern in ("rank-00000.*.jsonl", "node-*.jsonl")]
        self._view = RunView()
        self._due_s = clock()
        self._broken = False
        self._bar = ProgressBar(max=100, label="Steps", unit="%")
        self._chart = VegaChart(loss_chart(self._view))
        self._notes = Markdown("starting")
        card.append(Markdown(f"## Training, attempt {attempt + 1}"), id=f"title-{attempt}")
        for name, component in (("progress", self._bar), ("loss", self._chart), ("notes", self._notes)):
            card.append(component, id=f"{name}-{attempt}")

    def refresh(self, *, now: bool = False) -> None:
        """Bring the card up to date, at most every REFRESH_S unless `now`. A card that fails never stops training."""
        if self._broken or (not now and self._clock() < self._due_s):
            return
        self._due_s = self._clock() + REFRESH_S
        try:
            self._update()
        except Exception as error:
            self._broken = True
            log.warning("the training card is no longer updated: %s: %s", type(error).__name__, error)

    def _update(self) -> None:
        for tail in self._tails:
            self._view.feed(tail.poll())
        view = self._view
        self._bar.update(view.percent, metadata=view.pace())
        self._chart.update(loss_chart(view))
        self._notes.update(training_notes(view, self._clock()))
        self._card.refresh()


def loss_chart(view: RunView) -> dict[str, Any]:
    return line_chart(sorted(view.loss.items()), "step", "training loss (nats per token)")


def training_notes(view: RunView, now_s: float) -> str:
    """Markdown below the loss curve; `now_s` in unix seconds."""
    loss = f"{view.loss[view.step]:.4f}" if view.step in view.loss else "–"
    checkpoints = ", ".join(f"step {step}" for step in view.checkpoints[-LISTED_CHECKPOINTS:])
    lines = [
        f"**Loss** {loss} at step {view.step}, {format_count(view.tokens_per_second)} tokens/s",
        f"**Checkpoints** {len(view.checkpoints)}{f', newest last: {checkpoints}' if checkpoints else ''}",
        f"**Resumes** {'; '.join(view.resumes) or 'none'}",
        f"**Gang** {view.gang(now_s) or 'forming'}",
    ]
    return "\n".join(f"- {line}" for line in lines)


def evaluation_components(report: Mapping[str, Any]) -> list[Any]:
    """Cards' components for an EvalReport's dict: figures against the baselines, and samples as they came."""
    rows = [
        [
            "loss (nats per token)",
            f"{report['loss']:.4f}",
            f"{report['unigram_loss']:.4f}",
            f"{report['uniform_loss']:.4f}",
        ],
        ["accuracy", f"{report['accuracy']:.2%}", f"{report['unigram_accuracy']:.2%}", "–"],
        ["perplexity", f"{report['perplexity']:.2f}", "–", "–"],
        ["bits per byte", f"{report['bits_per_byte']:.3f}", "–", "–"],
    ]
    losses = [("model", report["loss"]), ("unigram", report["unigram_loss"]), ("uniform", report["uniform_loss"])]
    components: list[Any] = [
        Markdown(f"## Held-out text, step {report['step']}, {format_count(report['tokens'])} tokens"),
        Table(rows, headers=["", "model", "unigram", "uniform"]),
        VegaChart(bar_chart(losses, "loss (nats per token), lower is better")),
    ]
    if report["samples"]:
        components.append(Markdown("## Samples"))
    # PythonCode shows its text verbatim; Markdown would take what a model wrote for markup.
    return components + [PythonCode(code_string=f"{sample['prompt']}{sample['text']}") for sample in report["samples"]]


def cost_components(report: CostReport) -> list[Any]:
    """From what an undisturbed on-demand run would have cost to what was paid, and where the node time went."""
    *steps, (total, _) = report.waterfall()
    usd, seconds = report.usd_by_state, report.seconds_by_state
    rows = [[str(state), format_seconds(seconds[state]), format_usd(usd[state])] for state in usd if seconds[state]]
    rows.append(["paid", format_seconds(report.paid_us / 1e6), format_usd(report.paid_usd)])
    quote = report.quote
    price = f"{quote.instance_type}, {quote.capacity.replace('_', '-')}, as of {quote.as_of}: {quote.source}"
    return [
        Markdown(f"## Paid {format_usd(report.paid_usd)}, on-demand {format_usd(report.on_demand_usd)}"),
        VegaChart(waterfall(steps, total, "dollars")),
        Table(rows, headers=["state", "node time", "cost"]),
        Markdown(f"Prices: {html.escape(price)}"),
    ]
