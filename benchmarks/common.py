"""What the benchmarks share: interleaved repetitions, a table, and claims as JSON."""

import argparse
import json
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

Result = TypeVar("Result")
GOALS: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}


@dataclass(frozen=True)
class Claim:
    """One number. `goal` is "<= LIMIT" or ">= LIMIT" in `unit`, or None where nothing was promised."""

    name: str
    value: float
    unit: str
    goal: str | None = None

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        sign, limit = self.goal.split()
        return GOALS[sign](self.value, float(limit))

    def to_dict(self) -> dict[str, object]:
        return {"name": self.name, "value": self.value, "unit": self.unit, "goal": self.goal, "met": self.met}


@dataclass(frozen=True)
class Spread:
    """The median of several repetitions, and how far they lay apart."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(median(values), min(values), max(values))


def interleave(bodies: dict[str, Callable[[], Result]], repetitions: int) -> dict[str, list[Result]]:
    """Results of each body, run in turn A B C A B C …, so that whatever else the machine does meets all alike."""
    results: dict[str, list[Result]] = {name: [] for name in bodies}
    for _ in range(repetitions):
        for name, body in bodies.items():
            results[name].append(body())
    return results


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as they need to be: the first to the left, numbers to the right."""
    print()
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, ["-" * width for width in widths], *rows]:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print("  ".join(cells).rstrip())


def benchmark_parser(about: str) -> argparse.ArgumentParser:
    """A parser with the flags every benchmark has."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the claims there")
    parser.add_argument("--repetitions", type=int, default=3, metavar="N", help="of everything, in turn (default 3)")
    return parser


def report(claims: Sequence[Claim], file: Path | None) -> None:
    """Print the claims beside their goals, and write them where `--json` said."""
    verdicts = {True: "met", False: "MISSED", None: ""}
    rows = [[c.name, f"{c.value:,.4g}", c.unit, c.goal or "", verdicts[c.met]] for c in claims]
    print_table(["claim", "value", "unit", "goal", ""], rows)
    if file:
        file.write_text(json.dumps({"claims": [claim.to_dict() for claim in claims]}, indent=1) + "\n")
