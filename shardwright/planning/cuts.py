"""Contiguous cuts of a placed forward in stages: a few for each number of them.

That whose slowest stage is fastest, and those in which the slowest takes a little longer and less
is sent. Which of them is best, a schedule in time says (`costs.step_time`).

Both are dynamic programs (`stages`), exact over the positions that they try: all of them in a graph
of up to `POSITIONS` nodes, else of so many groups of neighbours the one in each that the fewest
bytes cross.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.clusters import Cluster
from shardwright.costs.placed import Floats, Integers, PlacedCosts
from shardwright.costs.roofline import worker_seconds
from shardwright.planning.stages import TOLERANCE, cuts_within, each_once, smallest_bound

POSITIONS = 192
Table = NDArray[np.bool_]
"""From where to where a stage may be."""
SLACKS = (1.0, 1.02, 1.1, 1.3, 2.0)
"""How much slower than it must be the slowest stage may be, where less is sent."""
MANY_STAGES = 16
"""Of more stages only every second slack is tried."""


@dataclass(frozen=True)
class NodeLine:
    """A forward as a line of nodes, with what a stage of neighbours takes and holds.

    at
        The positions at which stages may begin, and the end.
    seconds, stored, kept
        Sums of all nodes before each of them: seconds of a microbatch, bytes that are there all the
        time, bytes of one microbatch's activations.
    crossing
        Seconds of the messages of a cut at each of them, there and back.
    sending
        Seconds that the slot of a stage from each of them to each other is busy with messages.
    """

    placed: PlacedCosts
    at: Integers
    seconds: Floats
    stored: Floats
    kept: Floats
    crossing: Floats
    sending: Floats

    @classmethod
    def of(cls, placed: PlacedCosts, seconds: Floats, cluster: Cluster, *, again: bool) -> NodeLine:
        """The line of a forward whose nodes take these seconds, and keep as little as can be."""
        link = cluster.inside if len(cluster.hosts) == 1 else cluster.between
        bandwidth = link.send.bandwidth
        each = worker_seconds(cluster.device)
        count = len(seconds)
        bytes_crossing = _crossing(placed, count)
        first = len(placed.source.prepare)
        at = _positions(bytes_crossing, first, count)
        held = placed.stored
        sizes = held.size + held.gradient + held.state
        stored = first_readers(held.number, held.node, sizes, count)
        rows = placed.kept_rows(again=again)
        number = placed.storage[rows]
        activations = first_readers(number, placed.node[rows], placed.size[number], count)
        return cls(
            placed,
            at,
            _before(seconds)[at],
            _before(stored)[at],
            _before(activations)[at],
            bytes_crossing[at] / bandwidth,
            _sending(placed, at, each, 1 / bandwidth if cluster.device.kind == "cpu" else 0.0),
        )


def cuts(
    line: NodeLine, stages: int, held: Sequence[float] = (), memory: float = np.inf
) -> Iterator[Integers]:
    """The stage of each node, for cuts in so many stages; none where there is none that fits.

    ``held`` says how many microbatches' activations each stage holds, which with what it stores
    must stay within ``memory`` bytes; where it cannot, memory is left out of account.
    """
    if stages > len(line.at) - 1:
        return
    loads = _loads(line)
    fits = _fitting(line, stages, held, memory)
    costs = each_once(lambda fitting: np.where(fitting, loads, np.inf), fits)
    bound = smallest_bound(costs) if _may_fit(fits) else np.inf
    slacks: Sequence[float] = SLACKS if stages <= MANY_STAGES else SLACKS[::2]
    if not np.isfinite(bound):
        costs, slacks = [loads] * stages, slacks[:1]
        bound = smallest_bound(costs)
    crossing = np.broadcast_to(line.crossing[:, None], loads.shape)
    seen = set()
    for slack in slacks:
        chosen = cuts_within(costs, crossing, bound * slack * (1 + TOLERANCE))
        if tuple(chosen) not in seen:
            seen.add(tuple(chosen))
            yield stages_of_cut(line, chosen)


def stages_of_cut(line: NodeLine, chosen: Sequence[int]) -> Integers:
    """The stage of each node; what is done once a step has that of what reads it."""
    source = line.placed.source
    bounds, readers = line.at[list(chosen)], source.outline.readers
    stages = np.searchsorted(bounds[1:], np.arange(len(source.view.nodes)), side="right")
    for i in sorted(source.prepare, reverse=True):
        users = (at for v in source.view.nodes[i].outputs for at, _ in readers.get(v, ()))
        stages[i] = min((int(stages[at]) for at in users), default=0)
    return np.asarray(stages, dtype=np.int64)


# --- sums -----------------------------------------------------------------------------------------


def _before(numbers: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(numbers)])


def first_readers(number: Integers, node: Integers, size: Floats, count: int) -> Floats:
    """Bytes of values at the first of ``count`` nodes that reads each."""
    order = np.lexsort((node, number))
    first = order[np.flatnonzero(np.diff(number[order], prepend=-1))]
    return np.bincount(node[first], weights=size[first], minlength=count).astype(np.float64)


def _crossing(placed: PlacedCosts, count: int) -> Floats:
    """Bytes that cross in front of each node, and their gradients."""
    passed, change = placed.passed, np.zeros(count + 2)
    order = np.lexsort((-passed.reader, passed.value))
    last = order[np.flatnonzero(np.diff(passed.value[order], prepend=-1))]
    size = passed.size[last] * (1.0 + passed.has_gradient[last])
    np.add.at(change, passed.maker[last] + 1, size)
    np.add.at(change, passed.reader[last] + 1, -size)
    return np.cumsum(change)[: count + 1]


def _sending(placed: PlacedCosts, at: Integers, each: float, a_byte: float) -> Floats:
    """Seconds of messages, of a stage from each position to each other.

    Whoever sends and whoever takes is busy ``each`` second with a message, the sender ``a_byte``
    more for what is in it. A value that leaves is sent once; it is answered by its gradient.
    """
    passed = placed.passed
    order = np.lexsort((passed.reader, passed.value))
    number, made = passed.value[order], np.searchsorted(at, passed.maker[order], side="right")
    reader = np.searchsorted(
        at, passed.reader[order], side="right"
    )  # where a stage behind it begins
    answered, moving = passed.has_gradient[order], passed.size[order] * a_byte
    found = np.zeros((len(at) + 1, len(at) + 1))

    def add(begin: Integers, end: Integers, stop: Integers | int, seconds: Floats) -> None:
        """To stages that begin before or at ``begin``'s, and end from ``end`` to ``stop``."""
        np.add.at(found, (begin, end), seconds)
        np.add.at(found, (begin, np.broadcast_to(stop, end.shape)), -seconds)

    # What a stage takes, and answers: a value made before, by the first of its nodes that reads it.
    first = np.flatnonzero(np.diff(number, prepend=-1))
    before = np.concatenate([[0], reader[:-1]])
    before[first] = 0
    begin = np.maximum(before, made)
    taken = begin < reader
    seconds = each + answered * (each + moving)
    for rows, sign in ((begin[taken], 1.0), (reader[taken], -1.0)):
        add(rows, reader[taken], len(at), sign * seconds[taken])
    # What it sends, and is answered: a value made inside that is read behind.
    last = np.flatnonzero(np.diff(number, append=-1))
    last = last[reader[last] > made[last]]
    seconds = each + moving + answered * each
    for rows, sign in ((np.zeros_like(last), 1.0), (made[last], -1.0)):
        add(rows, made[last], reader[last], sign * seconds[last])
    return found.cumsum(0).cumsum(1)[:-1, :-1]


def _positions(crossing: Floats, first: int, count: int) -> Integers:
    """Where stages may begin, and the end."""
    inner = np.arange(first + 1, count)
    if len(inner) > POSITIONS:
        neighbours = np.array_split(inner, POSITIONS)
        inner = np.array([found[crossing[found].argmin()] for found in neighbours])
    return np.concatenate([[first], inner, [count]]).astype(np.int64)


# --- dynamic programs -----------------------------------------------------------------------------


def _loads(line: NodeLine) -> Floats:
    """Seconds of the stage from each position to each other; infinite where it has no node."""
    loads = line.seconds[None, :] - line.seconds[:, None]
    empty = np.tri(len(loads), dtype=bool)
    return np.where(empty, np.inf, np.maximum(loads + line.sending, 0.0))


def _fitting(line: NodeLine, stages: int, held: Sequence[float], memory: float) -> list[Table]:
    """Of each stage, from where to where it fits in a slot."""
    stored = line.stored[None, :] - line.stored[:, None]
    kept = line.kept[None, :] - line.kept[:, None]
    counts = [*held] or [0.0] * stages
    known = {count: stored + count * kept <= memory for count in set(counts)}
    return [known[count] for count in counts]


def _may_fit(fits: Sequence[Table]) -> bool:
    """Whether stages that are as long as fits, of which some may be empty, come to the end.

    What is a part of what fits, fits.
    """
    at, end = 0, len(fits[0]) - 1
    for table in fits:
        at = max(at, int(table[at].sum()) - 1)
    return at == end
