"""Seconds from a checkpoint of GPT-2 124M (weights and AdamW moments, 1.49 GB) to a trainer that can step on.

From disk: a fresh process, imports done, builds model and optimizer as a trainer does and loads the newest checkpoint.
Its pages are dropped from the page cache first, and are read past it. From host memory: the trainer lives on, and its
saver finds the snapshot that it still holds.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch._dynamo  # which the first module or optimizer would import: imports do not count
from checkpoint_subject import Subject, shape_of
from common import Claim, Spread, benchmark_parser, interleave, print_table, report
from raw_io import drop_cache

from flextrain.checkpoint import CheckpointSaver
from flextrain.checkpoint.shards import allocate_optimizer_state

Seconds = dict[str, float]
BUILD, ALLOCATE, LOAD, READY = "build the model", "allocate the moments", "load and verify", "ready, from disk"
RESTORE = "ready, from host memory"


def resume_here(root: Path, state_mb: float | None) -> Seconds:
    """Seconds of each stage of resuming in this process, which has built nothing yet."""
    marks_s = [time.perf_counter()]
    subject = Subject.make(shape_of(state_mb), allocate=False)
    marks_s.append(time.perf_counter())
    allocate_optimizer_state(subject.model, subject.optimizer)
    marks_s.append(time.perf_counter())
    if subject.saver(root).resume() is None:
        raise SystemExit(f"{root} holds no checkpoint")
    marks_s.append(time.perf_counter())
    stages = {name: marks_s[i + 1] - marks_s[i] for i, name in enumerate((BUILD, ALLOCATE, LOAD))}
    return {**stages, READY: marks_s[-1] - marks_s[0]}


def resume_afresh(root: Path, state_mb: float | None) -> Seconds:
    """The same in a process of its own, from the disk."""
    drop_cache(root)
    command = [sys.executable, __file__, "--of", str(root), *(["--state-mb", str(state_mb)] if state_mb else [])]
    seconds: Seconds = json.loads(subprocess.check_output(command, text=True))
    return seconds


def restore(saver: CheckpointSaver) -> Seconds:
    began_s = time.perf_counter()
    saver.resume()
    return {RESTORE: time.perf_counter() - began_s}


def measure(folder: Path, state_mb: float | None, repetitions: int) -> list[Claim]:
    subject = Subject.make(shape_of(state_mb))
    saver = subject.saver(folder)
    saver.save(1, {})
    saver.close()
    bodies = {"disk": lambda: resume_afresh(folder, state_mb), "memory": lambda: restore(saver)}
    results = interleave(bodies, repetitions)
    spreads = {name: Spread.of([run[name] for run in runs]) for runs in results.values() for name in runs[0]}
    rows = [
        [name, *(f"{1e3 * s:,.0f}" for s in (spread.median, spread.low, spread.high))]
        for name, spread in spreads.items()
    ]
    print_table([f"{subject.size_bytes / 1e6:,.0f} MB, {repetitions} repetitions", "ms", "fastest", "slowest"], rows)
    return [
        Claim("from disk to ready, imports excluded", spreads[READY].median, "s", "<= 1.0"),
        Claim("from host memory to ready", spreads[RESTORE].median, "s", "<= 0.25"),
    ]


def main(argv: list[str] | None = None) -> int:
    parser = benchmark_parser(__doc__ or "")
    parser.set_defaults(repetitions=5)
    parser.add_argument("--state-mb", type=float, metavar="MB", help="a smaller state (default GPT-2 124M's 1,492 MB)")
    parser.add_argument("--folder", metavar="DIR", help="on the disk to measure (default: the system's temporary one)")
    parser.add_argument("--of", type=Path, metavar="DIR", help="resume from here, print seconds as JSON, nothing else")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.of:
        print(json.dumps(resume_here(args.of, args.state_mb)))
        return 0
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        report(measure(Path(name), args.state_mb, args.repetitions), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
