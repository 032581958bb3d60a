"""Checkpoints of a GPT-2-124M-shaped state (weights and AdamW moments, fp32, 1.49 GB) beside what the machine can do.

Raw limits first, then torch.save, safetensors, DCP save and async_save, and ours, all in turn in every repetition.
Every ratio is one of medians of the same run. With `--ranks 2` two processes share the state by FSDP2, each with its
own disk file and its own writer; bytes are those of both, seconds those of the slower.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import raw_io
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_subject import Subject, shape_of
from common import Claim, Spread, benchmark_parser, interleave, print_table, report
from torch.multiprocessing.spawn import spawn

from flextrain.checkpoint.arena import Arena
from flextrain.checkpoint.shards import boxes_to_write
from flextrain.checkpoint.snapshot import layout_of

HERE = Path(__file__).parent
TRAIN_STEPS = 10  # from one checkpoint to the next
Seconds = dict[str, float]
# fmt: off
ROWS = {
    "memcpy": "memcpy, warm memory, one thread",
    "raw new": "raw: new file, O_DIRECT",
    "raw over": "raw: over an allocated file, O_DIRECT",
    "raw cold": "raw: read, O_DIRECT",
    "raw warm": "raw: read from the page cache",
    "torch.save": "torch.save and fsync",
    "safetensors": "safetensors and fsync",
    "dcp": "DCP save",
    "dcp async": "DCP async_save, to durable",
    "dcp async blocks": "DCP async_save, blocking",
    "first blocks": "ours: first snapshot, blocking",
    "later blocks": "ours: later snapshots, blocking",
    "second writer": "ours: new files, in the writer",
    "second durable": "ours: new files, from call to commit",
    "later writer": "ours: files reused, in the writer",
    "later durable": "ours: files reused, from call to commit",
    "load cold": "ours: load, verified, cold",
    "load warm": "ours: load, verified, in the page cache",
    "restore": "ours: restore from host memory",
    "start": "ours: start-up, once (arena and writer)",
}
# Name of a claim: (what, beside what, "time" or "rate", goal)
RATIOS = {
    "first snapshot blocks / memcpy": ("first blocks", "memcpy", "time", "<= 1.5"),
    "later snapshots block / memcpy": ("later blocks", "memcpy", "time", "<= 1.5"),
    "DCP async_save blocks / memcpy": ("dcp async blocks", "memcpy", "time", None),
    "save to new files, in the writer, of raw new-file rate": ("second writer", "raw new", "rate", ">= 90"),
    "save to new files, call to commit, of raw new-file rate": ("second durable", "raw new", "rate", None),
    "save over old files, call to commit, of raw new-file rate": ("later durable", "raw new", "rate", ">= 90"),
    "save over old files, in the writer, of raw overwrite rate": ("later writer", "raw over", "rate", ">= 75"),
    "cold verified load, of raw cold read": ("load cold", "raw cold", "rate", ">= 90"),
    "warm verified load, of raw warm read": ("load warm", "raw warm", "rate", ">= 50"),
    "restore from host memory, of memcpy": ("restore", "memcpy", "rate", ">= 60"),
    "torch.save, of raw new-file rate": ("torch.save", "raw new", "rate", None),
    "safetensors, of raw new-file rate": ("safetensors", "raw new", "rate", None),
    "DCP save, of raw new-file rate": ("dcp", "raw new", "rate", None),
    "DCP async_save, of raw new-file rate": ("dcp async", "raw new", "rate", None),
}
# fmt: on


class Bench:
    """One rank's bodies. Each returns seconds by row; ranks begin and end every timed part together."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        self._subject, self._folder = subject, folder
        self._file = folder / f"raw-{dist.get_rank()}"
        self._buffer = raw_io.filled(subject.size_bytes)
        self._slot = Arena.create(layout_of(boxes_to_write(subject.tensors)), slots=1).slot(0)
        raw_io.write_direct(self._file.with_suffix(".over"), self._buffer)

    def bodies(self) -> dict[str, Callable[[], Seconds]]:
        return {
            "raw": self.raw,
            "torch.save": lambda: self.peer("torch.save", lambda path: torch.save(self._subject.local, path)),
            "safetensors": lambda: self.peer(
                "safetensors", lambda path: safetensors.torch.save_file(self._subject.local, path)
            ),
            "dcp": self.dcp,
            "ours": self.ours,
        }

    def raw(self) -> Seconds:
        new, over = self._file.with_suffix(".new"), self._file.with_suffix(".over")
        new.unlink(missing_ok=True)
        seconds = {
            "memcpy": timed(lambda: raw_io.memcpy(self._slot, self._buffer)),
            "raw new": timed(lambda: raw_io.write_direct(new, self._buffer)),
            "raw over": timed(lambda: raw_io.write_direct(over, self._buffer)),
            "raw cold": timed(lambda: raw_io.read_direct(new, self._buffer)),
        }
        raw_io.read_cached(new, self._buffer)
        seconds["raw warm"] = timed(lambda: raw_io.read_cached(new, self._buffer))
        new.unlink()
        return seconds

    def peer(self, name: str, save: Callable[[Path], object]) -> Seconds:
        """Each rank its own tensors into a file of its own, made durable."""
        path = self._file.with_suffix(".peer")

        def durably() -> None:
            save(path)
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)

        seconds = timed(durably)
        path.unlink()
        return {name: seconds}

    def dcp(self) -> Seconds:
        folder = self._folder / "dcp"
        state: dict[str, Any] = dict(self._subject.tensors)
        seconds = {"dcp": timed(lambda: dcp.save(state, checkpoint_id=folder / "sync"))}
        began_s = time.perf_counter()
        pending: Any = None

        def start() -> None:
            nonlocal pending
            pending = dcp.async_save(state, checkpoint_id=folder / "async")

        seconds["dcp async blocks"] = timed(start)
        pending.result()
        dist.barrier()
        seconds["dcp async"] = time.perf_counter() - began_s
        clear(folder)
        return seconds

    def ours(self) -> Seconds:
        """Three saves by a fresh saver: two to new files, and one over those of the first, which is retired by then."""
        root = self._folder / "ours"
        saver = self._subject.saver(root)
        seconds = {"start": timed(saver.prepare)}
        for step, name in enumerate(("first", "second", "later"), 1):
            began_s = time.perf_counter()
            seconds[f"{name} blocks"] = timed(lambda step=step: saver.snapshot(step, {}))  # type: ignore[misc]
            saved = saver.wait()[-1]
            dist.barrier()
            seconds[f"{name} durable"] = time.perf_counter() - began_s
            seconds[f"{name} writer"] = saved.seconds
        saver.close()
        name, tensor = max(self._subject.local.items(), key=lambda item: item[1].nbytes)
        kept = tensor.clone()
        for temperature in ("cold", "warm"):
            tensor.zero_()
            (raw_io.drop_cache if temperature == "cold" else raw_io.fill_cache)(root)
            seconds[f"load {temperature}"] = timed(lambda: saver.load(saver.catalog, 3))
            if not torch.equal(kept, tensor):
                raise SystemExit(f"{name} was not restored")
        tensor.zero_()
        seconds["restore"] = timed(saver.resume)  # its newest snapshot is still in memory
        if not torch.equal(kept, tensor):
            raise SystemExit(f"{name} was not restored from memory")
        clear(root)
        return seconds


def timed(body: Callable[[], object]) -> float:
    """Seconds until the last rank is done."""
    dist.barrier()
    began_s = time.perf_counter()
    body()
    dist.barrier()
    return time.perf_counter() - began_s


def clear(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()


def run_rank(rank: int, ranks: int, folder: str, state_mb: float | None, repetitions: int, threads: int) -> None:
    """One process of the measurement; rank 0 writes seconds by row and the size of the whole state."""
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    subject = Subject.make(shape_of(state_mb))
    total = torch.tensor(subject.size_bytes)
    dist.all_reduce(total)
    results = interleave(Bench(subject, Path(folder)).bodies(), repetitions)
    if rank == 0:
        rows = [{key: value for body in results.values() for key, value in body[i].items()} for i in range(repetitions)]
        seconds = {key: [row[key] for row in rows] for key in rows[0]}
        (Path(folder) / "result.json").write_text(json.dumps({"size_bytes": int(total), "seconds": seconds}))
    dist.barrier()
    dist.destroy_process_group()


def measure_speed(folder: Path, args: Any) -> list[Claim]:
    place = folder / "speed"
    place.mkdir()
    spawn(run_rank, (args.ranks, str(place), args.state_mb, args.repetitions, args.threads), nprocs=args.ranks)
    result = json.loads((place / "result.json").read_text())
    shutil.rmtree(place)
    size_bytes, seconds = result["size_bytes"], {name: Spread.of(s) for name, s in result["seconds"].items()}
    rows = [[title, *_cells(seconds[name], size_bytes)] for name, title in ROWS.items()]
    title = f"{size_bytes / 1e6:,.0f} MB on {args.ranks} rank(s), {args.repetitions} repetitions in turn"
    print_table([title, "ms", "fastest", "slowest", "MB/s"], rows)
    claims = []
    for name, (ours, other, kind, goal) in RATIOS.items():
        ratio = seconds[ours].median / seconds[other].median
        value, unit = (ratio, "x") if kind == "time" else (100 / ratio, "%")
        claims.append(Claim(f"{args.ranks} rank(s): {name}", value, unit, goal))
    return claims


def _cells(seconds: Spread, size_bytes: int) -> list[str]:
    times = [f"{1e3 * value:,.0f}" for value in (seconds.median, seconds.low, seconds.high)]
    return [*times, f"{size_bytes / 1e6 / seconds.median:,.0f}"]


def measure_memory(folder: Path, args: Any) -> list[Claim]:
    """By processes of their own: what a save takes, and then what loading it takes."""
    root = folder / "memory"

    def run(what: str) -> dict[str, float]:
        command = [sys.executable, str(HERE / "checkpoint_memory.py"), what, str(root)]
        text = subprocess.check_output([*command, *([str(args.state_mb)] if args.state_mb else [])], text=True)
        result: dict[str, float] = json.loads(text)
        return result

    save, load = run("save"), run("load")
    shutil.rmtree(root)
    return [
        Claim("load, peak beyond its destination", load["extra_bytes"] / 1e6, "MB", "<= 128"),
        Claim(
            "trainer and writer, two snapshots in flight, over two states",
            save["extra_bytes"] / save["state_bytes"] / 2,
            "x",
            "<= 1.05",
        ),
    ]


def measure_training(folder: Path, args: Any) -> list[Claim]:
    """Stretches of ten steps, in turn with a checkpoint at the begin and without. One with a checkpoint ends when both
    its steps are done and the checkpoint is committed."""
    torch.set_num_threads(args.threads)
    subject = Subject.make(shape_of(args.state_mb))
    saver, count = subject.saver(folder / "training"), 0

    def stretch(checkpoint: bool) -> float:
        nonlocal count
        began_s = time.perf_counter()
        if checkpoint:
            count += 1
            saver.snapshot(count, {})
        for _ in range(TRAIN_STEPS):
            subject.step()
            saver.poll()
        saver.wait()
        return time.perf_counter() - began_s

    saver.prepare()
    stretch(True)
    results = interleave({"none": lambda: stretch(False), "saved": lambda: stretch(True)}, args.repetitions)
    saver.close()
    shutil.rmtree(folder / "training")
    seconds = {name: Spread.of(values) for name, values in results.items()}
    rows = [[name, *_cells(spread, subject.size_bytes)[:3]] for name, spread in seconds.items()]
    print_table([f"{TRAIN_STEPS} steps of training", "ms", "fastest", "slowest"], rows)
    share = 100 * seconds["none"].median / seconds["saved"].median
    return [
        Claim("training without checkpoints, one step", 1e3 * seconds["none"].median / TRAIN_STEPS, "ms"),
        Claim("training speed with a checkpoint every 10 steps, of that with none", share, "%", ">= 97"),
    ]


PARTS = {"speed": measure_speed, "memory": measure_memory, "training": measure_training}


def main(argv: list[str] | None = None) -> int:
    parser = benchmark_parser(__doc__ or "")
    parser.set_defaults(repetitions=5)
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="processes that share the state (default 1)")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), help="of it (default: all on one rank)")
    parser.add_argument("--state-mb", type=float, metavar="MB", help="a smaller state (default GPT-2 124M's 1,494 MB)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of torch in every process (default 1)")
    parser.add_argument("--folder", metavar="DIR", help="on the disk to measure (default: the system's temporary one)")
    args = parser.parse_args(argv)
    parts = args.parts or (list(PARTS) if args.ranks == 1 else ["speed"])
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start")
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        claims = [claim for part in parts for claim in PARTS[part](Path(name), args)]
    report(claims, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
