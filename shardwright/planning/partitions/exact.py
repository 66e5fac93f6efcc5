"""The exact optimum: over contiguous cuts of the order of nodes, and over all acyclic partitions.

Both minimise the largest cost of any stage, and of the cuts that do, take one that sends least.

contiguous
    Stages are ranges of the nodes in their order. A table of all ranges, and a dynamic program:
    O(stages · n²) time and O(n²) memory.
acyclic
    Stages are what lies between one down-set of the graph and a larger one: every way to cut it so
    that stages need one another in one direction only (Tarnawski et al., "Efficient Algorithms for
    Device Placement of DNN Graph Operators", NeurIPS 2020). As many down-sets as the graph has:
    few where layers follow one another, exponentially many where nodes stand side by side.
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

MOST_DOWN_SETS = 1500
"""Beyond that many the tables of `acyclic` would take seconds and hundreds of MB."""
MOST_NODES = 2000
"""Beyond that many nodes a contiguous cut is looked for at so many places only."""


# --- contiguous -----------------------------------------------------------------------------------


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


# --- acyclic --------------------------------------------------------------------------------------


def acyclic(
    workload: Workload, stages: int, limit: MemoryLimit | None = None, *, most: int = MOST_DOWN_SETS
) -> list[int] | None:
    """The stage of each node in the best of all acyclic partitions; None where there are too many.

    Raises PlanError where none fits in memory.
    """
    sets = down_sets(workload, most)
    if sets is None:
        return None
    inside = np.array([[held >> node & 1 for node in range(len(workload))] for held in sets], bool)
    chain = best_chain(set_tables(workload, inside), stages, limit)
    return [
        next(stage for stage, cut in enumerate(chain[1:]) if inside[cut, node])
        for node in range(len(workload))
    ]


def down_sets(workload: Workload, most: int) -> list[int] | None:
    """Every set of nodes that holds what its nodes read, as bits, smaller sets first.

    None where there are more than ``most``.
    """
    needs = [sum(1 << maker for maker in makers) for makers in workload.predecessors]
    level = {0}
    every = [0]
    for _ in range(len(workload)):
        level = {
            held | 1 << node
            for held in level
            for node, needed in enumerate(needs)
            if not held >> node & 1 and needed & ~held == 0
        }
        every += sorted(level)
        if len(every) > most:
            return None
    return every


def set_tables(workload: Workload, inside: np.ndarray) -> Tables:
    """What lies between two down-sets, as a stage; rows of ``inside`` say which nodes they have.

    No set stands before one that it holds.
    """
    count = len(inside)
    made = _columns(inside, [value.maker for value in workload.sent])
    read = _counts(inside, [value.readers for value in workload.sent])
    all_read = read == _counts(
        np.ones((1, len(workload)), bool), [v.readers for v in workload.sent]
    )
    held = _counts(inside, [value.readers for value in workload.stored])
    price = np.array([value.seconds for value in workload.sent])
    making = made @ np.array([value.kept for value in workload.sent], float)
    arriving = np.array([value.arrived for value in workload.sent], float)
    nbytes = np.array([value.nbytes for value in workload.stored], float)
    done = inside @ np.array(workload.seconds, float)
    tables = Tables(*(np.zeros((count, count)) for _ in range(4)))
    tables.seconds[:] = np.inf
    for j in range(count):
        rows = np.flatnonzero(~(inside[:j] & ~inside[j]).any(1))
        here = made[rows] & (read[rows] < read[j])
        left = made[j] & ~all_read[j]
        leaves = ~made[rows][:, left] @ price[left]
        tables.sent[rows, j] = arrives = here @ price
        tables.seconds[rows, j] = done[j] - done[rows] + arrives + leaves
        tables.stored[rows, j] = (held[rows] < held[j]) @ nbytes
        tables.kept[rows, j] = making[j] - making[rows] + here @ arriving
    return tables


def _columns(inside: np.ndarray, nodes: Sequence[int]) -> np.ndarray:
    return inside[:, nodes] if nodes else np.zeros((len(inside), 0), bool)


def _counts(inside: np.ndarray, groups: Sequence[Sequence[int]]) -> np.ndarray:
    """How many nodes of each group a set has."""
    if not groups:
        return np.zeros((len(inside), 0), np.int16)
    return np.stack([inside[:, list(group)].sum(1, dtype=np.int16) for group in groups], 1)
