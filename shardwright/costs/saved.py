"""What a node's backward reads of its forward, by the recorded backward of its call.

A value stands for what it is a view of; what is stored may be among what is read, since parameters
are there anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

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


def saved_beside(graph: IRGraph, node: IRNode, needing: Collection[int]) -> int:
    """The bytes that a node's backward reads of what are none of its inputs and outputs."""
    found = backward_of(graph, node, needing, ())
    return found.saved if found is not None else 0


def weight_residuals(
    view: IRGraph, trained: Collection[int], needing: Collection[int], bases: Mapping[int, int]
) -> Iterator[tuple[int, int, int, int]]:
    """What a slot holds between a backward and its weight gradients (zero bubble).

    Rows: a number for what is held, the position of the node, the value there, whole bytes. Held
    are what gradients of parameters read that are made apart from others (those of a norm are not),
    and gradients of what nodes make; values with the same gradient have the same number.
    """
    stored = {v for v in needing if bases.get(v, v) in trained}
    found = [backward_of(view, node, needing, stored) for node in view.nodes]
    position = {node.id: i for i, node in enumerate(view.nodes)}
    beyond = max(view.values, default=0) + 1
    for i, (node, backward) in enumerate(zip(view.nodes, found, strict=True)):
        if backward is None or not backward.late:
            continue
        for value_id in _values(node, backward, late=True):
            base = view.values[bases.get(value_id, value_id)]
            if not base.is_stored:
                yield base.id, i, value_id, base.nbytes
        for what, number in backward.reads(late=True):
            if what == "gradient":
                value_id = node.outputs[backward.gets[number]]
                same = _passed_on(view, found, position, value_id)
                yield beyond + same, i, value_id, view.values[value_id].nbytes


def _values(node: IRNode, found: BackwardGraph, *, late: bool = False) -> Iterator[int]:
    for what, number in found.reads(late=late):
        if what in ("input", "output"):
            yield (node.inputs if what == "input" else node.outputs)[number]


def _passed_on(
    view: IRGraph,
    found: list[BackwardGraph | None],
    position: Mapping[int, int],
    value_id: int,
) -> int:
    """The last value that has this one's gradient."""
    while True:
        users = dict.fromkeys(view.values[value_id].users)
        at = position[next(iter(users))] if len(users) == 1 else None
        backward = found[at] if at is not None else None
        if at is None or backward is None or len(view.nodes[at].outputs) != 1:
            return value_id
        if not _passes_on(backward, view.nodes[at].inputs.index(value_id)):
            return value_id
        value_id = view.nodes[at].outputs[0]


def _passes_on(backward: BackwardGraph, number: int) -> bool:
    """Whether an input's gradient is that of the output, seen otherwise at the most."""
    if number not in backward.gives:
        return False
    values = backward.graph.values
    nodes = {node.id: node for node in backward.early}
    gradient = made = values[backward.gives[number]]
    while gradient.producer is not None:
        node = nodes.get(gradient.producer)
        if node is None or not moves_nothing(backward.graph, node):
            return False
        gradient = values[node.inputs[0]]
    read = backward.inputs[gradient.id]
    return read is not None and read.what == "gradient" and gradient.nbytes == made.nbytes


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
