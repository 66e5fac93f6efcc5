"""Repeated layers, found in the sequence of nodes and nowhere else.

`repeated_blocks` looks at what each node does (operator, attributes, shapes and dtypes), not at
names or modules: where the sequence repeats with a period, one period is a block. A block may
begin anywhere in a period; it begins where the fewest bytes cross, which for a transformer is
between two layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwright.ir.values import IRNode, IRValue

if TYPE_CHECKING:
    from shardwright.ir.graph import IRGraph

SMALLEST_BLOCK = 3
"""Nodes; shorter periods (``relu relu relu``) are not layers."""
CANDIDATES = 6
"""How many periods are tried, the most frequent distances between equal nodes first."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """``count`` blocks of ``length`` nodes that do the same, the first at node ``start``."""

    start: int
    length: int
    count: int

    @property
    def cuts(self) -> list[int]:
        """Where blocks begin, and where the last one ends."""
        return [self.start + i * self.length for i in range(self.count + 1)]


def repeated_blocks(graph: IRGraph) -> list[Repeat]:
    """Runs of equal blocks, in order, that do not overlap."""
    kinds: dict[object, int] = {}
    marks = [kinds.setdefault(fingerprint(graph, node), len(kinds)) for node in graph.nodes]
    return repeats(marks, crossing_bytes(graph))


def repeats(
    marks: Sequence[int], crossing: Sequence[int], *, smallest: int = SMALLEST_BLOCK
) -> list[Repeat]:
    """Runs of equal blocks in a sequence of things, where those with equal marks are equal.

    ``crossing`` is the bytes that cross before each, and after the last; a block has ``smallest``
    things at least. The runs are in order and do not overlap.
    """
    found: list[Repeat] = []
    pending = [(0, len(marks))]
    while pending:
        start, stop = pending.pop()
        best = _longest_repeat(marks, start, stop, smallest)
        if best is not None:
            found.append(_aligned(best, stop, marks, crossing))
            pending += [(start, found[-1].start), (found[-1].cuts[-1], stop)]
    return sorted(found, key=lambda repeat: repeat.start)


def fingerprint(graph: IRGraph, node: IRNode) -> object:
    """What a node does, without names: equal for the same call on tensors of equal kind."""

    def kind(value: IRValue) -> object:
        meta = value.meta
        return meta.shape, meta.dtype, meta.strides, value.is_stored

    inputs = tuple(kind(graph.values[value_id]) for value_id in node.inputs)
    outputs = tuple(kind(graph.values[value_id]) for value_id in node.outputs)
    return node.op, inputs, outputs, repr(node.attrs)


def crossing_bytes(graph: IRGraph, nodes: Sequence[IRNode] | None = None) -> list[int]:
    """For each position between nodes, the bytes of made values that are alive across it.

    Entry ``i`` is before node ``i``; the list is one longer than the nodes. Graph outputs
    count as used where they are made. ``nodes`` is another order in which they can run.
    """
    order = graph.nodes if nodes is None else nodes
    position = {node.id: i for i, node in enumerate(order)}
    change = [0] * (len(order) + 2)
    for value in graph.values.values():
        if value.producer is not None and value.users:
            change[position[value.producer] + 1] += value.nbytes
            change[max(position[user] for user in value.users) + 1] -= value.nbytes
    total, result = 0, []
    for step in change[:-1]:
        total += step
        result.append(total)
    return result


def _longest_repeat(marks: Sequence[int], start: int, stop: int, smallest: int) -> Repeat | None:
    """The repeat within a range that covers the most nodes; the shortest period of those."""
    last: dict[int, int] = {}
    distances: Counter[int] = Counter()
    for i in range(start, stop):
        if marks[i] in last:
            distances[i - last[marks[i]]] += 1
        last[marks[i]] = i
    best: Repeat | None = None
    for length, _ in distances.most_common(CANDIDATES):
        if length >= smallest:
            repeat = _run_with_period(marks, start, stop, length)
            if repeat is not None and (best is None or _covers_more(repeat, best)):
                best = repeat
    return best


def _covers_more(repeat: Repeat, best: Repeat) -> bool:
    """More nodes, or as many (within a period) with shorter blocks."""
    covered, before = repeat.length * repeat.count, best.length * best.count
    if abs(covered - before) < max(repeat.length, best.length):
        return repeat.length < best.length
    return covered > before


def _run_with_period(marks: Sequence[int], start: int, stop: int, length: int) -> Repeat | None:
    """The longest run in which every node equals the one a period later."""
    best_start, best_size, size = start, 0, 0
    for i in range(start, stop - length):
        size = size + 1 if marks[i] == marks[i + length] else 0
        if size > best_size:
            best_start, best_size = i - size + 1, size
    count = best_size // length + 1
    return Repeat(best_start, length, count) if count > 1 else None


def _aligned(repeat: Repeat, stop: int, marks: Sequence[int], crossing: Sequence[int]) -> Repeat:
    """The same run, begun where the fewest bytes cross; it may hold one block less."""
    end = repeat.start + repeat.length
    while end < stop and marks[end] == marks[end - repeat.length]:
        end += 1
    starts = range(repeat.start, repeat.start + repeat.length)

    def cost(start: int) -> tuple[int, int, int]:
        count = (end - start) // repeat.length
        return (crossing[start + repeat.length], -count, start)

    start = min((s for s in starts if (end - s) // repeat.length > 1), key=cost)
    return Repeat(start, repeat.length, (end - start) // repeat.length)
