"""How the ranks of one gang find each other without guessing a port."""

import socket
import time
from datetime import timedelta

import torch.distributed as dist

from flextrain.errors import GangError, StorageError
from flextrain.storage import Store
from flextrain.world import World

POLL_S = 0.05


def meet(world: World, board: Store, key: str, host: str, timeout_s: float) -> dist.TCPStore:
    """The TCPStore that all ranks of a gang share; `host` is where rank 0 can be reached.

    Rank 0 listens on a port the kernel chooses and publishes `host:port` as object `key` of `board`, a place every
    node can read; the others wait for it. Two gangs on one machine thus never collide, and a gang whose key is taken
    already (a second controller of the same attempt) is refused with AlreadyExists.
    Raises GangError where rank 0 does not show up within `timeout_s`.
    """
    timeout = timedelta(seconds=timeout_s)
    if world.is_main:
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        board.put(key, f"{host}:{store.port}".encode(), create=True)
        return store
    address, _, port = _wait_for(board, key, timeout_s).rpartition(":")
    return dist.TCPStore(socket.gethostbyname(address), int(port), is_master=False, timeout=timeout)


def _wait_for(board: Store, key: str, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return board.get(key).decode()
        except StorageError as error:
            if time.monotonic() > deadline:
                raise GangError(
                    f"rank 0 did not publish its address at {board.url_of(key)} within {timeout_s:.0f} s",
                    number=4,
                    remedy="look at the log of node 0: it died, or cannot write there",
                ) from error
        time.sleep(POLL_S)
