"""The rank processes of one node: started together, ended together."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import flextrain
from flextrain.errors import FlextrainError, GangError, unpack
from flextrain.processes import die_with_parent
from flextrain.world import World

REPORT_GRACE_S = 3.0  # a peer's death reaches the others first; the rank that knows the reason may need a moment more
TERMINATE_GRACE_S = 5.0
LOST_A_PEER = 7  # number of the GangError that says no more than that another rank is gone


class RankProcesses:
    """`python -m flextrain.train.main SPEC`, once per world; a context manager that leaves no process behind."""

    def __init__(self, worlds: list[World], spec: Path, reports: Path, threads: int) -> None:
        self._reports = reports
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "flextrain.train.main", str(spec)],
                env=_environ(world, threads),
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
            for world in worlds
        ]

    def __enter__(self) -> "RankProcesses":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.terminate()
        deadline = time.monotonic() + TERMINATE_GRACE_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def running(self) -> bool:
        """False once all have ended well; raises the error of the rank that failed."""
        codes = [process.poll() for process in self._processes]
        if any(code not in (None, 0) for code in codes):
            raise self._explain()
        return None in codes

    def result(self) -> dict[str, Any]:
        """What local rank 0 reported."""
        result: dict[str, Any] = json.loads((self._reports / "result-0.json").read_text())
        return result

    def _explain(self) -> FlextrainError:
        """The most telling error of any rank: one that names a cause, else the way the first one died."""
        deadline = time.monotonic() + REPORT_GRACE_S
        while time.monotonic() < deadline and any(process.poll() is None for process in self._processes):
            time.sleep(0.05)
        errors = [unpack(json.loads(path.read_text())) for path in sorted(self._reports.glob("error-*.json"))]
        causes = [error for error in errors if (type(error), error.number) != (GangError, LOST_A_PEER)]
        if causes:
            return min(causes, key=lambda error: isinstance(error, GangError))
        codes = [(rank, process.returncode) for rank, process in enumerate(self._processes)]
        silent = [(rank, code) for rank, code in codes if code and not (self._reports / f"error-{rank}.json").exists()]
        if not silent:
            return errors[0]
        rank, code = silent[0]
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        return GangError(
            f"local rank {rank} {how}",
            number=5,
            remedy="start again: training resumes; where it is killed again, it probably lacks memory",
        )


def count_gpus() -> int:
    """GPUs of this node, without importing torch: CUDA_VISIBLE_DEVICES where set, else the device files."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() and name.strip() != "-1"])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _environ(world: World, threads: int) -> dict[str, str]:
    source = str(Path(flextrain.__file__).parents[1])  # a flow's code package is on sys.path only, not installed
    path = os.pathsep.join(part for part in (source, os.environ.get("PYTHONPATH")) if part)
    return {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        **world.environ(),
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
    }
