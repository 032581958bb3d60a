"""Seconds from the start of the flow to the first printed loss, and how many of them are Metaflow's.

In turn, each in a fresh folder without index, runs or Metaflow data: `python flows/train_flow.py run` at its default of
two nodes, and `flextrain train --ranks 2`, which is the same work without a flow. Both train for a few steps of the
embedded default, which changes nothing before the first loss.

What the flow waits for comes from the run's own events: they say when the index was being built, when the agents of the
nodes lived and when held-out text was scored. The rest of its time went to Metaflow and to starting Python for its
steps.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common import Claim, Spread, benchmark_parser, interleave, print_table, report

from flextrain.cost.ledger import Incarnation, read_ledger
from flextrain.tracking import read_events

FLOW = Path(__file__).parents[1] / "flows" / "train_flow.py"
FIRST_LOSS = re.compile(r"\bstep +1/\d+ .*\bloss \d")
TIMEOUT_S = 900


@dataclass(frozen=True)
class Run:
    """A run's length and when its first loss came, in seconds since its start; `busy` are the times at which our own
    code was at work, as (begin, end), by what it was doing."""

    first_loss_s: float
    wall_s: float
    busy: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def busy_s(self, until_s: float) -> float:
        """Seconds before `until_s` in which any of our code was at work."""
        return covered((min(lo, until_s), min(hi, until_s)) for spans in self.busy.values() for lo, hi in spans)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for lo, hi in sorted(spans):
        total += max(0.0, hi - max(lo, reached))
        reached = max(reached, hi)
    return total


def watch(command: Sequence[str], folder: str) -> Run:
    """Run a command in `folder` to its end. Fails loudly where it fails or prints no loss."""
    began_s = time.time()  # the clock of the events
    environ = {
        **os.environ,
        "METAFLOW_HOME": f"{folder}/metaflow-home",
        "METAFLOW_DATASTORE_SYSROOT_LOCAL": folder,
        "PYTHONUNBUFFERED": "1",
    }
    first_s, lines = None, []
    process = subprocess.Popen(
        command, cwd=folder, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if first_s is None and FIRST_LOSS.search(line):
                first_s = time.time() - began_s
            if time.time() - began_s > TIMEOUT_S:
                process.kill()
    if process.returncode or first_s is None:
        raise SystemExit("".join(lines[-40:]) + f"\n{' '.join(command)}: exit code {process.returncode}")
    return Run(first_s, time.time() - began_s, busy_times(Path(folder), began_s))


def busy_times(folder: Path, began_s: float) -> dict[str, list[tuple[float, float]]]:
    """From the events below `folder`, in seconds since `began_s`."""
    busy: dict[str, list[tuple[float, float]]] = {}
    for events in folder.glob("runs/*/*/events"):
        for life in read_ledger(read_events(events)).incarnations:
            span = (life.spans[0].begin_us / 1e6 - began_s, life.spans[-1].end_us / 1e6 - began_s)
            busy.setdefault(occupation(life), []).append(span)
    return busy


def occupation(life: Incarnation) -> str:
    return "train" if life.trains else str(life.spans[0].state)


def run_flow(steps: int) -> Run:
    with tempfile.TemporaryDirectory(prefix="first-run-") as folder:
        config = f"training: {{max_steps: {steps}}}"
        return watch([sys.executable, str(FLOW), "--config-value", "config", config, "run"], folder)


def run_alone(steps: int) -> Run:
    with tempfile.TemporaryDirectory(prefix="first-run-") as folder:
        command = [sys.executable, "-m", "flextrain.cli.main", "train", "--ranks=2", f"--training.max_steps={steps}"]
        return watch(command, folder)


def stages(run: Run) -> dict[str, float]:
    """The flow's time to its first loss, cut at the borders that its events name."""
    index_lo, index_hi = run.busy["index"][0]
    train_lo = min(lo for lo, _ in run.busy["train"])
    return {
        "Metaflow: start, until the index is begun": index_lo,
        "index": index_hi - index_lo,
        "Metaflow: until the first node's agent begins": train_lo - index_hi,
        "agents and ranks, to the first loss": run.first_loss_s - train_lo,
        "in all, to the first loss": run.first_loss_s,
    }


def main(argv: list[str] | None = None) -> int:
    parser = benchmark_parser(__doc__ or "")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="optimizer steps of each run (default 10)")
    args = parser.parse_args(argv)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start")
    bodies = {"flow": lambda: run_flow(args.steps), "alone": lambda: run_alone(args.steps)}
    runs = interleave(bodies, args.repetitions)
    print_stages(runs["flow"], args.steps)
    report(list(claims(runs["flow"], runs["alone"], args.steps)), args.json)
    return 0


def print_stages(runs: Sequence[Run], steps: int) -> None:
    rows = {name: Spread.of([stages(run)[name] for run in runs]) for name in stages(runs[0])}
    rows[f"whole flow of {steps} steps"] = Spread.of([run.wall_s for run in runs])
    print_table(
        [f"seconds, {len(runs)} runs", "median", "lowest", "highest"],
        [[name, f"{s.median:.1f}", f"{s.low:.1f}", f"{s.high:.1f}"] for name, s in rows.items()],
    )


def claims(flow: Sequence[Run], alone: Sequence[Run], steps: int) -> Iterable[Claim]:
    first_s = Spread.of([run.first_loss_s for run in flow]).median
    alone_s = Spread.of([run.first_loss_s for run in alone]).median
    waiting_s = Spread.of([run.first_loss_s - run.busy_s(run.first_loss_s) for run in flow]).median
    whole_s = Spread.of([run.wall_s - run.busy_s(run.wall_s) for run in flow]).median
    yield Claim("flow start to first loss", first_s, "s", "<= 20")
    yield Claim("flextrain train --ranks 2, start to first loss", alone_s, "s")
    yield Claim("Metaflow's part of the flow's first loss", waiting_s, "s")
    yield Claim("Metaflow's share of the flow's first loss", 100 * waiting_s / first_s, "%")
    yield Claim(f"Metaflow's part of a whole flow of {steps} steps", whole_s, "s")


if __name__ == "__main__":
    sys.exit(main())
