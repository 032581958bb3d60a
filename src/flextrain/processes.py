"""What our child processes have in common."""

import ctypes
import os
import signal
import sys


def die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when its parent dies, so that a killed one leaves no orphan holding a GPU.

    `parent` is the pid of who started it: where that one is dead already, so is this process at once.
    """
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
