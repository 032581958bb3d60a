"""Real rank processes for tests: `run_ranks(4, body, *args)` runs body(world, *args) on four gloo ranks.

Bodies are module-level functions of the test file; their results come back in order of rank. A rank that raises fails
the test with its traceback, and one that hangs is killed after `timeout_s`. Processes are forked from a server that has
imported torch already, which makes them start in milliseconds.
"""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch.distributed.fsdp", "torch._dynamo", "flextrain.train.trainer", "tests.support.ranks"]
)


def run_ranks(
    size: int, body: Callable[..., Any], *args: Any, timeout_s: float = 120.0, local_size: int | None = None
) -> list[Any]:
    """Results of `body(world, *args)` on `size` processes; `local_size` of them form a node (default: all)."""
    ranks = start_ranks(size, body, *args, local_size=local_size)
    try:
        outcomes = [_outcome(process, pipe, timeout_s) for process, pipe in ranks]
    finally:
        for process, _ in ranks:
            process.kill()
            process.join()
    errors = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
    assert not errors, "\n".join(errors)
    return [value for _, value in outcomes]


def start_ranks(
    size: int, body: Callable[..., Any], *args: Any, local_size: int | None = None
) -> list[tuple[Any, Connection]]:
    """Start the processes without waiting: (process, pipe) each, for tests that kill some of them."""
    meeting = tempfile.mkdtemp(prefix="ranks-") + "/store"
    started = []
    for rank in range(size):
        ours, theirs = _context.Pipe(duplex=False)
        place = (rank, size, rank % (local_size or size), local_size or size)
        process = _context.Process(target=_run, args=(place, meeting, theirs, body, args), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    return started


def _outcome(process: Any, pipe: Connection, timeout_s: float) -> tuple[bool, Any]:
    try:
        return pipe.recv() if pipe.poll(timeout_s) else (False, f"no result within {timeout_s} s")
    except EOFError:
        process.join(5)
        return False, f"died with exit code {process.exitcode}"


def _run(place: tuple[int, int, int, int], meeting: str, pipe: Connection, body: Callable[..., Any], args: Any) -> None:
    import torch
    import torch.distributed as dist

    from flextrain.world import World

    rank, size, local_rank, local_size = place
    world = World(rank, size, local_rank, local_size, rank // local_size)
    os.environ.update(world.environ())
    torch.set_num_threads(1)
    try:
        if size > 1:
            dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
        pipe.send((True, body(world, *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
