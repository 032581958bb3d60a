"""Real rank processes for tests: `run_ranks(4, body, *args)` runs body(world, *args) on four gloo ranks.

Bodies are module-level functions of the test file; their results come back in order of rank. A rank that raises fails
the test with its traceback, and one that hangs is killed after `timeout_s`.
"""

import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_ranks(size: int, body: Callable[..., Any], *args: Any, timeout_s: float = 120.0, local_size: int | None = None) -> list[Any]:
    """Results of `body(world, *args)` on `size` processes; `local_size` of them form a node (default: all)."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = Path(folder) / "job.pickle"
        module = Path(sys.modules[body.__module__].__file__ or "")
        job.write_bytes(pickle.dumps((str(module), body.__name__, args)))
        processes = [_start(rank, size, local_size or size, Path(folder)) for rank in range(size)]
        try:
            codes = [process.wait(timeout_s) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        errors = [path.read_text() for path in sorted(Path(folder).glob("error-*.txt"))]
        assert codes == [0] * size, "\n".join(errors) or f"exit codes {codes}"
        return [pickle.loads((Path(folder) / f"result-{rank}.pickle").read_bytes()) for rank in range(size)]


def _start(rank: int, size: int, local_size: int, folder: Path) -> subprocess.Popen[bytes]:
    environ = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank % local_size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(rank // local_size),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    return subprocess.Popen([sys.executable, "-m", "tests.support.ranks", str(folder)], env=environ, cwd=ROOT)


def _main(folder: Path) -> None:
    import importlib.util

    import torch.distributed as dist

    from flextrain.world import World

    world = World.detect()
    try:
        module_path, name, args = pickle.loads((folder / "job.pickle").read_bytes())
        spec = importlib.util.spec_from_file_location(Path(module_path).stem, module_path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        if world.size > 1:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=world.rank, world_size=world.size)
        result = getattr(module, name)(world, *args)
        (folder / f"result-{world.rank}.pickle").write_bytes(pickle.dumps(result))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        (folder / f"error-{world.rank}.txt").write_text(f"rank {world.rank}:\n{traceback.format_exc()}")
        os._exit(1)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
