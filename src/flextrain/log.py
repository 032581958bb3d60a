"""Logs that say which rank speaks: `12:04:31 rank 2 | text`, and on one process just the text's time."""

import logging
import os
import sys

from flextrain.errors import ConfigError
from flextrain.world import World


def get_logger(name: str) -> logging.Logger:
    """A logger below `flextrain`; quiet until `setup` or the user's own logging configuration speaks."""
    return logging.getLogger(name if name.startswith("flextrain") else f"flextrain.{name}")


def setup(world: World | None = None, level: str | None = None) -> None:
    """Log to stderr with the rank in front; ranks above 0 only from warnings up. FLEXTRAIN_LOG sets the level.

    Raises ConfigError for a level that logging does not know.
    """
    world = world or World()
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure:  # a terminal that cannot show a character shows another one
        reconfigure(errors="replace")
    root = logging.getLogger("flextrain")
    root.handlers.clear()
    prefix = f"rank {world.rank} | " if world.size > 1 else ""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(message)s", datefmt="%H:%M:%S"))
    root.addHandler(handler)
    root.propagate = False
    default = "INFO" if world.is_main else "WARNING"
    root.setLevel(_known_level((level or os.environ.get("FLEXTRAIN_LOG") or default).upper()))


def _known_level(level: str) -> str:
    if level not in logging.getLevelNamesMapping():
        raise ConfigError(
            f"{level!r} is no log level", number=7, remedy="set FLEXTRAIN_LOG to DEBUG, INFO, WARNING or ERROR"
        )
    return level
