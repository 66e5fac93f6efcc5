"""The optimal contiguous cut of the nodes' order, by dynamic programming.

It minimises the largest cost of any stage, and of the cuts that do, takes one that sends least: a
table of all ranges of nodes, and a dynamic program, in O(stages · n²) time and O(n²) memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from shardwright.errors import PlanError
from shardwright.planning.partitions.chains import Table, Tables, best_chain
from shardwright.planning.partitions.memory_limit import MemoryLimit
from shardwright.planning.partitions.workload import Workload

MOST_NODES = 2000
"""Beyond that many nodes a contiguous cut is looked for at so many places only."""


def contiguous(
    workload: Workload,
    stages: int,
    limit: MemoryLimit | None = None,
    *,
    allowed: float | None = None,
    anchored: bool = False,
) -> list[int]:
    """The stage of each node in the best cut of their order. Raises PlanError.

    With ``anchored`` every stage reads something stored.

    With ``allowed`` messages count apart from work: of all cuts whose stages have at most so many
    seconds of work, or as few as can be, it is the one that sends least. Of more than `MOST_NODES`
    nodes only the places where least crosses are tried.
    """
    places = cut_places(workload, stages)
    tables = range_tables(workload, places)
    if allowed is not None:
        work = range_tables(replace(workload, sent=()), places).seconds
        tables = replace(tables, seconds=work)
    if anchored:
        before = np.searchsorted(workload.anchors, places)
        tables.seconds[before[:, None] >= before[None, :]] = np.inf
    cuts = best_chain(tables, stages, limit, allowed=allowed or 0.0)
    return stages_between([places[cut] for cut in cuts])


def recut(
    workload: Workload,
    stages: Sequence[int],
    limit: MemoryLimit | None = None,
    *,
    allowed: float | None = None,
) -> list[int]:
    """`contiguous` for the nodes stage after stage, instead of in their own order.

    Stages that none reads from an earlier one are such a cut themselves: it is no worse than they
    are, unless they are more than `MOST_NODES` nodes. They stay where nothing fits in memory.
    """
    order = sorted(range(len(workload)), key=lambda node: (stages[node], node))
    place = {node: at for at, node in enumerate(order)}
    try:
        cut = contiguous(_in_order(workload, order, place), max(stages) + 1, limit, allowed=allowed)
    except PlanError:
        return list(stages)
    return [cut[place[node]] for node in range(len(workload))]


def _in_order(workload: Workload, order: Sequence[int], place: Mapping[int, int]) -> Workload:
    """The same workload with its nodes in another order."""

    def moved(nodes: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(place[node] for node in nodes))

    return replace(
        workload,
        seconds=tuple(workload.seconds[node] for node in order),
        sent=tuple(
            value._replace(maker=place[value.maker], readers=moved(value.readers))
            for value in workload.sent
        ),
        stored=tuple(value._replace(readers=moved(value.readers)) for value in workload.stored),
    )


def stages_between(cuts: Sequence[int]) -> list[int]:
    """The stage of each node, for positions at which stages begin and the last one ends."""
    return [stage for stage, (start, stop) in enumerate(pairwise(cuts)) for _ in range(start, stop)]


def cut_places(workload: Workload, stages: int, most: int = MOST_NODES) -> list[int]:
    """Positions at which a cut may be: all, or those across which the fewest seconds are sent."""
    count = len(workload)
    if count <= most:
        return list(range(count + 1))
    change = np.zeros(count + 2)
    for value in workload.sent:
        change[value.maker + 1] += value.seconds
        change[value.readers[-1] + 1] -= value.seconds
    crossing = np.cumsum(change)[: count + 1]
    inner = np.argsort(crossing[1:count], kind="stable")[: max(most, stages) - 1] + 1
    return [0, *sorted(inner.tolist()), count]


def range_tables(workload: Workload, places: Sequence[int]) -> Tables:
    """What each range between two places would carry as a stage."""
    size = len(places)
    at = np.searchsorted(places, np.arange(len(workload)), side="right") - 1
    done = np.zeros(size)
    np.add.at(done[1:], at, workload.seconds)
    seconds = _between(np.cumsum(done))
    sent, stored, kept = (np.zeros((size, size)) for _ in range(3))
    leaving = np.zeros((size + 1, size + 1))
    making = np.zeros(size)
    for value in workload.sent:
        maker, readers = int(at[value.maker]), _distinct(at, value.readers)
        making[maker + 1] += value.kept
        for start, stop, first in _first_readers(readers, maker + 1):
            sent[start:stop, first + 1] += value.seconds
            kept[start:stop, first + 1] += value.arrived
        if readers[-1] > maker:
            leaving[0, maker + 1] += value.seconds
            leaving[maker + 1, maker + 1] -= value.seconds
            leaving[0, readers[-1] + 1] -= value.seconds
            leaving[maker + 1, readers[-1] + 1] += value.seconds
    for held in workload.stored:
        for start, stop, first in _first_readers(_distinct(at, held.readers), 0):
            stored[start:stop, first + 1] += held.nbytes
    sent, stored = sent.cumsum(1), stored.cumsum(1)
    kept = kept.cumsum(1) + _between(np.cumsum(making))
    seconds += sent + leaving.cumsum(0).cumsum(1)[:size, :size]
    seconds[np.tril_indices(size)] = np.inf
    return Tables(seconds, sent, stored, kept)


def _between(sums: Table) -> Table:
    """Of prefix sums, what lies between two places."""
    found: Table = sums[None, :] - sums[:, None]
    return found


def _distinct(at: np.ndarray, nodes: Sequence[int]) -> list[int]:
    return sorted({int(at[node]) for node in nodes})


def _first_readers(readers: Sequence[int], begin: int) -> list[tuple[int, int, int]]:
    """Starts (from, to) of ranges from ``begin`` on, and the first reader that they come to."""
    found, start = [], begin
    for reader in readers:
        if reader >= start:
            found.append((start, reader + 1, reader))
            start = reader + 1
    return found
