"""What our child processes have in common."""

import ctypes
import signal
import sys


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, so that a killed one leaves no orphan holding a GPU."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
