"""Loading by all ranks together: what several of them want is read from the store once and handed on.

Every rank says what it wants and what it can reach; all of them derive the same plan from that (`handover`) and follow
it in order, so every message has its counterpart whatever fails. A reader reads ahead in threads while earlier chunks
travel; memory beyond the destination is READ_AHEAD + ARRIVING chunks, and what the reads under way need.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from flextrain.checkpoint.chunks import Chunks, Parts, Places, in_order
from flextrain.checkpoint.handover import Chunk, Handover, Situation, plan, spans
from flextrain.checkpoint.manifest import CHUNK_BYTES, Manifest
from flextrain.checkpoint.reader import check_fits, parts_of, read_into
from flextrain.checkpoint.shards import State, local_boxes
from flextrain.checkpoint.sources import Bytes
from flextrain.checkpoint.together import all_or_none
from flextrain.errors import CheckpointCorrupt, CheckpointError, StorageError, unpack

READ_AHEAD, ARRIVING = 3, 2  # chunks in memory, of those this rank sends and of those it receives


def read_together(places: Places, manifest: Manifest, state: State) -> None:
    """Fill every rank's `state` from a checkpoint; called by all ranks together, with the same manifest.

    `places` are this rank's, nearest first: an object may lie in another rank's alone. What fails anywhere is raised
    everywhere: CheckpointMismatch and CheckpointCorrupt, also where nobody reaches an object in full size, StorageError
    where a place ails, and CheckpointError where a chunk was damaged between two ranks.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or "cpu" not in dist.get_backend_config():
        all_or_none(lambda: read_into(places, manifest, state))
        return
    parts: dict[str, Parts] = {}

    def survey() -> tuple[Situation, dict[str, Any] | None]:
        check_fits(manifest.tensors, state, in_order(places)[-1].url)
        parts.update(parts_of(manifest, local_boxes(state)))
        return _reach(places, manifest, {name: spans(wanted) for name, wanted in parts.items()})

    found = all_or_none(survey)
    ranks = [situation for situation, _ in found]
    _check_reachable(places, manifest, ranks, [ailing for _, ailing in found if ailing])
    with ExitStack() as opened:
        exchange = _Exchange(places, manifest, parts, opened)
        all_or_none(lambda: exchange.run(plan(ranks)))


def _reach(
    places: Places, manifest: Manifest, wants: dict[str, list[tuple[int, int]]]
) -> tuple[Situation, dict[str, Any] | None]:
    """What this rank can reach in full size, and the error of a place that does not say what it has."""
    near, far, ailing = set[str](), set[str](), None
    for folder in in_order(places):
        try:
            sizes = {entry.key: entry.size_bytes for entry in folder.list()}
        except StorageError as error:
            ailing = error.pack()
            continue
        whole = {name for name, entry in manifest.objects.items() if sizes.get(name) == entry.size_bytes}
        (near if folder.local_root else far).update(whole)
        if len(near) == len(manifest.objects):
            break  # a further place has no more
    return Situation(wants, frozenset(near), frozenset(far)), ailing


def _check_reachable(places: Places, manifest: Manifest, ranks: list[Situation], ailing: list[dict[str, Any]]) -> None:
    """The same error on every rank, where there is one: what they found is the same."""
    reached = frozenset[str]().union(*(one.near | one.far for one in ranks))
    lacking = sorted(manifest.objects.keys() - reached)
    if lacking and ailing:
        raise unpack(ailing[0])
    if lacking:
        raise CheckpointCorrupt(
            f"{in_order(places)[-1].url_of(lacking[0])} is missing or cut short, also on all other ranks",
            number=2,
            remedy="an older checkpoint is used where there is one",
        )


@dataclass
class _Travelling:
    """A chunk on its way: to be waited for, then used or, on the reader's side, to be read over."""

    works: list[Any]
    then: Callable[[], None]


def _buffer() -> Tensor:
    return torch.empty(CHUNK_BYTES + 1, dtype=torch.uint8)


class _Exchange:
    """One rank's part in following a plan."""

    def __init__(self, places: Places, manifest: Manifest, parts: dict[str, Parts], opened: ExitStack) -> None:
        self._places, self._manifest, self._parts, self._opened = places, manifest, parts, opened
        self._rank = dist.get_rank()
        self._error: Exception | None = None
        self._aborted = False
        self._chunks: dict[str, Chunks] = {}
        self._lock = threading.Lock()
        self._travelling: deque[_Travelling] = deque()

    def run(self, handovers: list[Handover]) -> None:
        """Raises what went wrong here; where it went wrong elsewhere, the tensors hold anything."""
        mine = [(tag, one) for tag, one in enumerate(handovers) if one.concerns(self._rank)]
        self._follow(mine)
        if self._error:
            raise self._error
        if self._aborted:
            return
        came = {one.chunk for _, one in mine}
        for name, parts in self._parts.items():
            with Chunks(self._places, name, self._manifest.objects[name]) as chunks:
                chunks.scatter(parts, [index for index in parts if (name, index) not in came])

    def _follow(self, mine: list[tuple[int, Handover]]) -> None:
        """Messages are posted in the order of the plan by all ranks, and each waits for its oldest first: the oldest
        of all that are under way has nothing to wait for but its reader's read."""
        to_read = deque(one.chunk for _, one in mine if one.reader == self._rank)
        own, arriving = ([_buffer() for _ in range(n)] for n in (READ_AHEAD, ARRIVING))
        ahead: deque[Future[Tensor]] = deque()
        with ThreadPoolExecutor(READ_AHEAD) as pool:
            for tag, handover in mine:
                if handover.reader != self._rank:
                    self._wait_for(arriving)
                    self._receive(handover, tag, arriving)
                    continue
                if not ahead:
                    self._wait_for(own)
                while own and to_read:
                    ahead.append(pool.submit(self._read, to_read.popleft(), own.pop()))
                self._send(handover, tag, ahead.popleft().result(), own)
            while self._travelling:
                self._settle()

    def _wait_for(self, buffers: list[Tensor]) -> None:
        while not buffers:
            self._settle()

    def _settle(self) -> None:
        oldest = self._travelling.popleft()
        for work in oldest.works:
            work.wait()
        oldest.then()

    def _send(self, handover: Handover, tag: int, buffer: Tensor, own: list[Tensor]) -> None:
        message = buffer[: self._length(handover.chunk) + 1]
        works = [dist.isend(message, rank, tag=tag) for rank in handover.receivers]
        self._travelling.append(_Travelling(works, partial(own.append, buffer)))
        if message[-1]:
            self._use(handover.chunk, message[:-1].numpy())

    def _receive(self, handover: Handover, tag: int, arriving: list[Tensor]) -> None:
        buffer = arriving.pop()
        message = buffer[: self._length(handover.chunk) + 1]

        def use() -> None:
            if message[-1]:
                self._use_sound(handover, message[:-1].numpy())
            else:
                self._aborted = True  # its reader says why
            arriving.append(buffer)

        self._travelling.append(_Travelling([dist.irecv(message, handover.reader, tag=tag)], use))

    def _use_sound(self, handover: Handover, raw: Bytes) -> None:
        name, index = handover.chunk
        if xxhash.xxh3_64_hexdigest(raw.data) == self._manifest.objects[name].chunks[index]:
            return self._use(handover.chunk, raw)
        self._error = self._error or CheckpointError(
            f"chunk {index} of {name} was damaged on its way from rank {handover.reader} to rank {self._rank}",
            number=60,
            remedy="start again; where it happens again, look at the memory and the network of these machines",
        )
        return None

    def _use(self, chunk: Chunk, raw: Bytes) -> None:
        name, index = chunk
        try:
            if name in self._parts and index in self._parts[name]:
                self._parts[name].place(index * CHUNK_BYTES, raw)
                self._parts[name].verified(index)
        except Exception as error:  # the plan is followed to its end: others wait for what this rank sends
            self._error = self._error or error

    def _read(self, chunk: Chunk, buffer: Tensor) -> Tensor:
        """In a thread: the chunk, and behind it a byte that tells whether it is sound."""
        (name, index), raw = chunk, buffer.numpy()
        length = self._length(chunk)
        raw[length] = 0
        if self._error:
            return buffer  # the ranks will fail as one; what is left of the plan is followed in haste

        def keep(begin: int, piece: Bytes) -> None:
            low = begin - index * CHUNK_BYTES
            np.copyto(raw[low : low + len(piece)], piece)

        try:
            self._open(name).fetch(index, keep)
            raw[length] = 1
        except Exception as error:
            self._error = self._error or error
        return buffer

    def _open(self, name: str) -> Chunks:
        with self._lock:
            if name not in self._chunks:
                chunks = Chunks(self._places, name, self._manifest.objects[name])
                self._chunks[name] = self._opened.enter_context(chunks)
            return self._chunks[name]

    def _length(self, chunk: Chunk) -> int:
        name, index = chunk
        return min(CHUNK_BYTES, self._manifest.objects[name].size_bytes - index * CHUNK_BYTES)
