"""Contiguous cuts of an order of nodes, by dynamic programming.

Of all cuts in so many stages it has the smallest largest cost of a stage, and of those that do the
one that sends least: a table of all ranges of nodes, and a dynamic program, in O(stages · n²) time
and O(n²) memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.errors import PlanError
from shardwright.planning.workload import Shares, Workload
from shardwright.schedules import make_schedule

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


def by_bytes(workload: Workload, stages: int, memory: MemoryLimit) -> list[int]:
    """The stage of each node in the cut of their order whose fullest stage holds least.

    Of more than `MOST_NODES` nodes only the places where least crosses are tried. Raises PlanError
    where there are too few nodes.
    """
    places = cut_places(workload, stages)
    tables = range_tables(workload, places)
    held = [tables.held_between(stage, stages, memory) for stage in range(stages)]
    found = best_cuts(held, tables.sent)
    if found is None:
        raise PlanError(_UNCUT.format(stages))
    return stages_between([places[cut] for cut in found])


def recut(
    workload: Workload,
    order: Sequence[int],
    cut: Callable[[Workload], list[int]],
    merit: Callable[[Shares], float],
) -> list[int]:
    """The better of two cuts by ``cut``: of the nodes in an order, and in their own.

    ``merit`` is what shall be small, before the seconds of messages. Raises PlanError where there
    is no cut in either order.
    """
    place = {node: at for at, node in enumerate(order)}

    def rank(found: list[int]) -> tuple[float, float]:
        shares = Shares.of(workload, found, range(max(found) + 1))
        return merit(shares), shares.sent

    try:
        along = cut(_in_order(workload, order, place))
    except PlanError:
        return cut(workload)
    found = [along[place[node]] for node in range(len(workload))]
    try:
        return min(found, cut(workload), key=rank)
    except PlanError:
        return found


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
    change = np.zeros(len(workload) + 2)
    for value in workload.sent:
        change[value.maker + 1] += value.seconds
        change[value.readers[-1] + 1] -= value.seconds
    return least_crossed(np.cumsum(change)[:-1], stages, most)


def least_crossed(crossing: Table, stages: int, most: int = MOST_NODES) -> list[int]:
    """Positions at which a cut may be: all, or those where least crosses; the ends too."""
    count = len(crossing) - 1
    if count <= most:
        return list(range(count + 1))
    inner = np.argsort(crossing[1:count], kind="stable")[: max(most, stages) - 1] + 1
    return [0, *sorted(inner.tolist()), count]


def range_tables(workload: Workload, places: Sequence[int]) -> Tables:
    """What each range between two places would carry as a stage."""
    size, at = len(places), _ranges(workload, places)
    sent, kept = (np.zeros((size, size)) for _ in range(2))
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
    sent = sent.cumsum(1)
    kept = kept.cumsum(1) + _between(np.cumsum(making))
    seconds = work_between(workload, places)
    seconds += sent + leaving.cumsum(0).cumsum(1)[:size, :size]
    return Tables(seconds, sent, stored_between(workload, places), kept)


def work_between(workload: Workload, places: Sequence[int]) -> Table:
    """Seconds of the nodes between two places; infinite where there are none."""
    done = np.zeros(len(places))
    np.add.at(done[1:], _ranges(workload, places), workload.seconds)
    seconds = _between(np.cumsum(done))
    seconds[np.tril_indices(len(places))] = np.inf
    return seconds


def stored_between(workload: Workload, places: Sequence[int]) -> Table:
    """Bytes of the stored values that nodes between two places read, each once."""
    at, stored = _ranges(workload, places), np.zeros((len(places), len(places)))
    for held in workload.stored:
        for start, stop, first in _first_readers(_distinct(at, held.readers), 0):
            stored[start:stop, first + 1] += held.nbytes
    return stored.cumsum(1)


def _ranges(workload: Workload, places: Sequence[int]) -> np.ndarray:
    """The number of the place that is last before each node."""
    return np.searchsorted(places, np.arange(len(workload)), side="right") - 1


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


# --- dynamic programming --------------------------------------------------------------------------
#
# Of all chains with that many stages no other has a smaller largest cost, and none of those with
# the same largest cost sends less.


Table = NDArray[np.float64]
TOLERANCE = 1e-12
"""Costs this near to each other, relatively, are equal: sums in another order differ by less."""


@dataclass(frozen=True, slots=True)
class Tables:
    """What the stage between two cuts carries; ``seconds`` is infinite where there is none.

    ``sent`` are the seconds of what it receives, ``stored`` the bytes that it holds, ``kept`` those
    that it holds of each microbatch that is under way.
    """

    seconds: Table
    sent: Table
    stored: Table
    kept: Table

    def fitting(self, stage: int, stages: int, limit: MemoryLimit | None) -> Table:
        """The seconds, infinite where stage number ``stage`` would not fit in memory."""
        if limit is None:
            return self.seconds
        held = self.held(stage, stages, limit)
        return np.where(held <= limit.nbytes, self.seconds, np.inf)

    def held(self, stage: int, stages: int, limit: MemoryLimit) -> Table:
        """The bytes that stage number ``stage`` of so many would hold."""
        return self.stored + limit.under_way(stage, stages) * self.kept

    def held_between(self, stage: int, stages: int, limit: MemoryLimit) -> Table:
        """`held`, infinite where there is no stage."""
        return np.where(np.isfinite(self.seconds), self.held(stage, stages, limit), np.inf)


def best_chain(
    tables: Tables, stages: int, limit: MemoryLimit | None = None, *, allowed: float = 0.0
) -> list[int]:
    """The cuts 0 = c0 < c1 < … = n between ``stages`` stages.

    Costs up to ``allowed`` are as good as smaller ones. Raises PlanError where no chain has that
    many stages that all fit in memory.
    """
    fitting = [tables.fitting(stage, stages, limit) for stage in range(stages)]
    found = best_cuts(fitting, tables.sent, allowed=allowed)
    if found is None:
        raise PlanError(_too_full(tables, stages, limit))
    return found


def best_cuts(costs: Sequence[Table], sent: Table, allowed: float = 0.0) -> list[int] | None:
    """The cuts whose largest cost is smallest, or up to ``allowed``, and that send least of them.

    ``costs`` has a table a stage. None where no cuts have finite costs.
    """
    bound = smallest_bound(costs)
    if math.isinf(bound):
        return None
    return cuts_within(costs, sent, max(bound * (1 + TOLERANCE), allowed))


def smallest_bound(costs: Sequence[Table]) -> float:
    """The smallest largest cost of a stage that cuts have; ``costs`` has a table a stage."""
    return _walk(costs, np.maximum)[0]


def cuts_within(costs: Sequence[Table], sent: Table, bound: float) -> list[int]:
    """The cuts that send least, of those whose costs are all up to a bound that some cuts keep."""
    return _walk(each_once(lambda table: np.where(table <= bound, sent, np.inf), costs), np.add)[1]


def each_once(make: Callable[[Any], Table], tables: Sequence[Any]) -> list[Table]:
    """A table made of each; what is one object stays one."""
    made = {number: make(table) for number, table in {id(t): t for t in tables}.items()}
    return [made[id(table)] for table in tables]


def _walk(tables: Sequence[Table], join: Any) -> tuple[float, list[int]]:
    """The least that stages come to, one table a stage, joined by sum or maximum, and the cuts."""
    by_end = each_once(lambda table: np.ascontiguousarray(table.T), tables)
    best, choices, ends = tables[0][0], [], np.arange(len(tables[0]))
    for table in by_end[1:]:
        joined = join(best, table)
        choices.append(joined.argmin(axis=1))
        best = joined[ends, choices[-1]]
    cuts = [len(best) - 1]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return float(best[-1]), [0, *reversed(cuts)]


_UNCUT = "the graph cannot be cut in {} stages; ask for fewer"


def _too_full(tables: Tables, stages: int, limit: MemoryLimit | None) -> str:
    uncut = _UNCUT.format(stages)
    if limit is None:
        return uncut
    held = [tables.held_between(stage, stages, limit) for stage in range(stages)]
    least, cuts = _walk(held, np.maximum)
    if not np.isfinite(least):
        return uncut
    fullest = max(range(stages), key=lambda stage: held[stage][cuts[stage], cuts[stage + 1]])
    return limit.message(fullest, stages, least)


# --- memory ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """``nbytes`` of a slot, in a step of so many microbatches in the order of a schedule.

    ``chunks`` is how many stages a rank has, ``names`` the slot of each stage, for messages. Of a
    model that is not trained nothing is held for a backward, so the schedule does not matter.
    """

    nbytes: float
    microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    names: tuple[str, ...] = ()

    def under_way(self, stage: int, stages: int) -> int:
        """How many microbatches a stage holds at most between their forwards and backwards."""
        return _peaks(self.schedule, stages // self.chunks, self.chunks, self.microbatches)[stage]

    def held(self, shares: Shares, replicas: Sequence[int] | None = None) -> list[float]:
        """The bytes that each slot of a rank holds at most; one slot each by default."""
        replicas = [1] * len(shares.stored) if replicas is None else replicas
        stages = len(shares.ranks)
        counts: list[list[int]] = [[] for _ in shares.stored]
        for stage, rank in enumerate(shares.ranks):
            counts[rank].append(self.under_way(stage, stages))
        return [
            stored + kept * sum(found) / len(found) / slots
            for stored, kept, found, slots in zip(
                shares.stored, shares.kept, counts, replicas, strict=True
            )
        ]

    def message(self, stage: int, stages: int, least: float) -> str:
        """That no partition fits, and what would."""
        return (
            f"no cut in {stages} stages fits in memory: even the least full leaves stage {stage}"
            f"{f' on slot {self.names[stage]!r}' if self.names else ''} with "
            f"{shortage_text(least, self.nbytes)}"
        )


REMEDY = "plan for more devices or smaller microbatches, or compute activations again (recompute=)"


def shortage_text(least: float, room: float) -> str:
    """How many bytes are needed, how many are missing, and what to do."""
    return (
        f"{least:.0f} bytes, {least - room:.0f} more than a slot's {room:.0f}; it would fit in "
        f"slots of {math.ceil(least)} bytes: give those, {REMEDY}"
    )


@lru_cache(maxsize=256)
def _peaks(kind: str, ranks: int, chunks: int, microbatches: int) -> Sequence[int]:
    """The most microbatches that each stage holds, from its forward to its last backward work."""
    schedule = make_schedule(kind, ranks=ranks, microbatches=microbatches, chunks=chunks)
    change = {"F": 1, schedule.works[-1]: -1}
    held, peaks = [0] * schedule.stages, [0] * schedule.stages
    for action in (action for actions in schedule.actions for action in actions):
        held[action.stage] += change.get(action.kind, 0)
        peaks[action.stage] = max(peaks[action.stage], held[action.stage])
    return peaks
