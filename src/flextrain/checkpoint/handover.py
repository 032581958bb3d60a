"""Who reads which chunk for whom: a pure function of what every rank wants and of what it can reach."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Chunk = tuple[str, int]  # an object's name, and the chunk's index in it


@dataclass(frozen=True)
class Situation:
    """One rank's: the chunks it wants of each object as [first, past the last), and the objects it can reach, in
    folders of its machine (`near`) or in a store (`far`), in full size."""

    wants: Mapping[str, Sequence[tuple[int, int]]]
    near: frozenset[str] = field(default_factory=frozenset)
    far: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True)
class Handover:
    """A chunk that `reader` reads and sends to `receivers`; it may want it too."""

    chunk: Chunk
    reader: int
    receivers: tuple[int, ...]

    def concerns(self, rank: int) -> bool:
        return rank == self.reader or rank in self.receivers


def plan(ranks: Sequence[Situation]) -> list[Handover]:
    """What is read by one rank for others, in an order that all of them follow; all else each rank reads itself.

    A chunk travels where a rank that wants it has it in no folder of its own: then a rank that has it so sends it,
    rather one that wants it too; and where there is none, one of several that would fetch it from the store. Readers
    are chosen so that all of them read about as much. What nobody reaches is left out.
    """
    wanted: dict[Chunk, list[int]] = defaultdict(list)
    for rank, situation in enumerate(ranks):
        for name in situation.wants:
            if name not in situation.near:
                for index in _indexes(situation.wants[name]):
                    wanted[name, index].append(rank)
    asked = {name for name, _ in wanted}
    holders = {name: [rank for rank, one in enumerate(ranks) if name in one.near] for name in asked}
    fetchers = {name: [rank for rank, one in enumerate(ranks) if name in one.far] for name in asked}
    load = [0] * len(ranks)
    found = []
    for (name, index), needy in sorted(wanted.items()):
        eager = [rank for rank in holders[name] if _wants(ranks[rank], name, index)]
        candidates = eager or holders[name] or [r for r in needy if name in ranks[r].far] or fetchers[name]
        reader = min(candidates, key=lambda rank: (load[rank], rank), default=-1)
        receivers = tuple(rank for rank in needy if rank != reader)
        if candidates and receivers:
            load[reader] += 1
            found.append(Handover((name, index), reader, receivers))
    return found


def spans(indexes: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending numbers as [first, past the last) of each run of neighbours."""
    found: list[tuple[int, int]] = []
    for index in indexes:
        if found and found[-1][1] == index:
            found[-1] = (found[-1][0], index + 1)
        else:
            found.append((index, index + 1))
    return found


def _indexes(wants: Sequence[tuple[int, int]]) -> Iterable[int]:
    return (index for first, past in wants for index in range(first, past))


def _wants(situation: Situation, name: str, index: int) -> bool:
    return any(first <= index < past for first, past in situation.wants.get(name, ()))
