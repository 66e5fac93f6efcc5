"""What a backward reads of its forward, and has in hand, by the recorded backward of a call.

A value stands for what it is a view of; what is stored may be among what is read, since parameters
are there anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache

from shardwright.autodiff.backward import BackwardGraph, backward_of
from shardwright.costs.operations import FREE
from shardwright.costs.views import moves_nothing
from shardwright.ir import IRGraph, IRNode

EACH_OF_ITS_OWN = frozenset(("aten.broadcast_tensors.default",))
"""Each output is a view of the input at its place."""


def saved_for_backward(
    graph: IRGraph, node: IRNode, needing: Collection[int], bases: Mapping[int, int]
) -> tuple[int, ...]:
    """The ids of the values that a node's backward reads, each once; views are resolved.

    ``needing`` are the values that want gradients; ``bases`` are those of `view_bases`, or none.
    """
    found = backward_of(graph, node, needing, ())
    read = _values(node, found) if found is not None else ()
    return tuple(dict.fromkeys(bases.get(value_id, value_id) for value_id in read))


def _values(node: IRNode, found: BackwardGraph) -> Iterator[int]:
    for what, number in found.reads():
        if what in ("input", "output"):
            yield (node.inputs if what == "input" else node.outputs)[number]


def view_bases(graph: IRGraph) -> dict[int, int]:
    """For each view, what it is a view of in the end."""
    bases: dict[int, int] = {}
    for node in graph.nodes:
        if node.op in EACH_OF_ITS_OWN:
            pairs = zip(node.outputs, node.inputs, strict=True)
            bases |= {made: bases.get(seen, seen) for made, seen in pairs}
        elif node.op in FREE and moves_nothing(graph, node):
            base = bases.get(node.inputs[0], node.inputs[0])
            bases |= dict.fromkeys(node.outputs, base)
    return bases


@lru_cache(maxsize=1 << 12)
def same_gradient(found: BackwardGraph, value_id: int) -> int | None:
    """Of which gradient that is read a gradient is a view, or that itself."""
    values, makers = found.graph.values, {v: node for node in found.early for v in node.outputs}
    size = values[value_id].nbytes
    while value_id in makers and moves_nothing(found.graph, makers[value_id]):
        value_id = makers[value_id].inputs[0]
    read = found.inputs.get(value_id)
    is_same = read is not None and read.what == "gradient" and values[value_id].nbytes == size
    return read.number if read is not None and is_same else None


@lru_cache(maxsize=1 << 13)
def inner_bytes(found: BackwardGraph, sizes: tuple[int, ...], work: float) -> tuple[float, float]:
    """The most bytes that B and W have in hand, beside what they read and give to other nodes."""
    known = {v: float(sizes[number]) for v, number in found.sizes.items()}
    early = _most_bytes(found, found.early, known, work, {*found.gives.values()})
    return early, _most_bytes(found, found.late, known, work, set())


def _most_bytes(
    found: BackwardGraph,
    nodes: Sequence[IRNode],
    known: Mapping[int, float],
    work: float,
    given: set[int],
) -> float:
    """Of calls one after another; what they give out is not counted, nor is what adds in place."""
    graph, base = found.graph, dict[int, int]()
    last: dict[int, int] = {}
    for i, node in enumerate(nodes):
        seen = moves_nothing(graph, node)
        for v in node.outputs:
            base[v] = base.get(node.inputs[0], node.inputs[0]) if seen else v
        last |= {base.get(v, v): i for v in (*node.inputs, *node.outputs)}
    outside = {base.get(v, v) for v in given}
    accumulated = {v for v, read in found.inputs.items() if read is None}
    now = most = 0.0
    ends: dict[int, list[float]] = {}
    for i, node in enumerate(nodes):
        if accumulated.isdisjoint(node.inputs):
            for v in node.outputs:
                if base[v] == v and v not in outside:
                    nbytes = known.get(v, graph.values[v].nbytes / work)
                    now += nbytes
                    ends.setdefault(last[v], []).append(nbytes)
        most = max(most, now)
        now -= sum(ends.pop(i, ()))
    return most
