"""Where this process stands among its peers. The only module that reads rank environment variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from flextrain.errors import GangError


@dataclass(frozen=True)
class World:
    """rank of size processes; local_rank of local_size on this node; node counts from 0."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.size and 0 <= self.local_rank < self.local_size):
            raise GangError(
                f"rank {self.rank} of {self.size} (local {self.local_rank} of {self.local_size}) is no valid place",
                number=1,
                remedy="start the processes with torchrun or flextrain train, or unset RANK and WORLD_SIZE",
            )

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @classmethod
    def detect(cls, environ: Mapping[str, str] | None = None) -> "World":
        """The world that torchrun's variables describe; a world of one where none are set.

        Raises GangError where a variable is not a number or the numbers contradict each other.
        """
        environ = os.environ if environ is None else environ

        def read(name: str, default: int) -> int:
            text = environ.get(name) or str(default)
            if not text.lstrip("-").isdecimal():
                raise GangError(
                    f"{name}={text!r} is not a whole number", number=2, remedy=f"unset {name} or give it a number"
                )
            return int(text)

        local_size = read("LOCAL_WORLD_SIZE", 1)
        rank = read("RANK", 0)
        node = read("GROUP_RANK", rank // max(1, local_size))
        return cls(rank, read("WORLD_SIZE", 1), read("LOCAL_RANK", 0), local_size, node)

    def environ(self) -> dict[str, str]:
        """The variables that make `detect` in a child process return this world."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "GROUP_RANK": str(self.node),
        }
