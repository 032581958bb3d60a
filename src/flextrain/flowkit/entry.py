"""Starting a flow file where Metaflow's expectations of its environment are not met."""

import os
import sys
from collections.abc import MutableMapping
from typing import Any

USER_VARIABLES = ("METAFLOW_USER", "SUDO_USER", "USERNAME", "USER")
NOBODY = "flextrain"  # who runs belong to where root starts them


def run_flow(flow: type) -> Any:
    """Hand over to Metaflow's command line; the last line of every flow file."""
    prepare(os.environ)
    return flow()


def prepare(environ: MutableMapping[str, str]) -> None:
    """Put this interpreter first on PATH, and name the user where nothing else does.

    Metaflow starts the other nodes of a local gang as `python`, whatever interpreter runs the flow, and refuses to run
    where no variable names a user other than root, as in most containers.
    """
    binaries = os.path.dirname(sys.executable)
    path = environ.get("PATH", "").split(os.pathsep)
    if path[0] != binaries:
        environ["PATH"] = os.pathsep.join([binaries, *path])
    if not {environ.get(name) for name in USER_VARIABLES} - {None, "", "root"}:
        environ["USERNAME"] = NOBODY
