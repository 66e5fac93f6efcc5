"""What the occurrences of a training step wait for, and when their tensors are dead.

A worker goes through a turn in order, but does not wait for the communication that it starts, and
may begin a turn while earlier ones wait for others. What always holds if it begins an occurrence
only when those in its ``after`` are done: it reads what it would read if all were done one after
another, it overwrites nothing that is still to be read, no tensor is dropped before its last reader
is done, and a group's communication begins in the order of the microbatches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from shardwright.engine.occurrences import Occurrence, Place, PlannedTurn, occurrences_of

Sharing = Mapping[str, frozenset[str]]
"""Tensor to the constants in whose memory it lies, where those change in a step."""


def in_order(
    turns: Sequence[PlannedTurn],
    sharing: Sharing,
    *,
    lookahead: int,
    constants: int,
    kept: Collection[Place],
) -> list[PlannedTurn]:
    """The turns with ``after`` and ``drops``.

    ``sharing`` says which tensors, constants among them, lie in memory that changes, and in which
    constants'. The tensors in ``kept`` are not dropped, nor are those in the space ``constants``.

    Turns that are more than ``lookahead`` actions apart are never under way together, and within a
    turn computation keeps its order anyhow, so nobody need wait for those.
    """
    needed = _needs(turns, sharing)
    lives = _Lives(turns, constants=constants, kept=kept)
    found = []
    for k, turn in enumerate(turns):
        near = _near(turns[:k], turn, lookahead)
        occurrences = []
        for occurrence in turn.occurrences:
            drops = lives.drops.get(occurrence.index, [])
            last = set[int]().union(*(lives.readers.get(place, ()) for place in drops))
            after = near & (needed[occurrence.index] | last)
            occurrences.append(replace(occurrence, after=tuple(sorted(after)), drops=tuple(drops)))
            if occurrence.step.communicates:
                near.add(occurrence.index)
        found.append(PlannedTurn(turn.action, tuple(occurrences)))
    return found


def _read(occurrence: Occurrence, sharing: Sharing) -> Iterator[object]:
    """What an occurrence must find as it was made: tensors, and memory that changes."""
    yield from occurrence.reads
    for _, name in occurrence.reads:
        yield from sharing.get(name, ())


def _made(occurrence: Occurrence) -> Iterator[object]:
    """What is another after an occurrence; communication of a group goes in order."""
    yield from ((occurrence.space, name) for name in occurrence.step.outputs)
    yield from occurrence.step.writes
    if occurrence.step.communicates:
        yield "group", occurrence.step.group


@dataclass(slots=True)
class _Use:
    """Who made a resource as it is now, if anybody did, and who has read it since."""

    makers: tuple[int, ...] = ()
    readers: list[int] = field(default_factory=list)


class _Lives:
    """Which tensors are dead after which occurrence, and who reads each of them.

    The tensors in ``kept`` are never dead, nor are those in the space ``constants``.
    """

    def __init__(
        self, turns: Sequence[PlannedTurn], *, constants: int, kept: Collection[Place]
    ) -> None:
        self.readers: dict[Place, set[int]] = {}
        last: dict[Place, int] = {}
        for occurrence in occurrences_of(turns):
            for place in occurrence.reads:
                self.readers.setdefault(place, set()).add(occurrence.index)
                last[place] = occurrence.index
            for name in occurrence.step.outputs:
                last[occurrence.space, name] = occurrence.index
        self.drops: dict[int, list[Place]] = {}
        for place, index in last.items():
            if place[0] != constants and place not in kept:
                self.drops.setdefault(index, []).append(place)


def _near(earlier: Sequence[PlannedTurn], turn: PlannedTurn, lookahead: int) -> set[int]:
    """The occurrences of earlier turns that may be under way when ``turn`` is."""
    turns = takewhile(lambda other: turn.action - other.action <= lookahead, reversed(earlier))
    return {occurrence.index for occurrence in occurrences_of(turns)}


def _needs(turns: Sequence[PlannedTurn], sharing: Sharing) -> dict[int, set[int]]:
    """What each occurrence waits for: makers of what it reads, readers of what it overwrites."""
    uses: dict[object, _Use] = {}
    needed: dict[int, set[int]] = {}
    for occurrence in occurrences_of(turns):
        mine = needed.setdefault(occurrence.index, set())
        for resource in _read(occurrence, sharing):
            use = uses.setdefault(resource, _Use())
            use.readers.append(occurrence.index)
            mine.update(use.makers)
        for resource in _made(occurrence):
            use = uses.setdefault(resource, _Use())
            mine.update(use.readers, use.makers)
            uses[resource] = _Use((occurrence.index,))
    return needed
