"""Pointwise fusion: elementwise operators that feed one another as one `shardwright::chain`.

Operators of one family (`pointwise_rules`) that can be done together are one node; values that
others read too are further outputs of it. An addition, a ReLU, its gradient or a cast that stands
alone stays what it is: they are kinds of their own. A constant of no dimension is a literal.

Every step rounds as it did, and what others read has the strides that it had; where a kernel could
not say so, smaller ones are tried whose values all have the same. A kernel has at most `LONGEST`
instructions and `WIDEST` operands.

Doing a group of nodes as one makes no cycle: each node has a level, which rises along every edge
that does not fuse; nodes are together only if edges that fuse join them and they have one level, so
that no path leaves a group and comes back. A node that one other alone reads may join it higher up:
all that leaves it goes through that one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from typing import Any

from shardwright.compiler.passes.pointwise_memory import ChainNodes, LivenessBound, Recomputing
from shardwright.compiler.passes.pointwise_rules import (
    CAST,
    ChainWriter,
    family,
    instructions,
    length,
)
from shardwright.compiler.passes.rewriter import Rewriter
from shardwright.errors import GraphError
from shardwright.ir import IRGraph, IRNode, IRValue
from shardwright.ir.values import Input
from shardwright.kernels.chains import (
    Chain,
    ChainInput,
    ChainInstruction,
    ChainOperand,
    ChainResult,
    check_chain,
)
from shardwright.kernels.operators import CHAIN
from shardwright.kernels.strides import result_strides

LONGEST = 30
WIDEST = 16

_ALONE = frozenset(
    {"aten.relu.default", "aten.threshold_backward.default", CAST, "aten.add.Tensor"}
)
"""What stays as it is where nothing fuses with it; an addition only if it is of two tensors."""


def fuse_pointwise(graph: IRGraph) -> IRGraph:
    """The graph with chains."""
    found = _Fuser(graph).found()
    if not found:
        return graph
    rewriter = Rewriter(graph)
    for unit in units(graph, [written.nodes for written in found.values()]):
        if (written := found.get(unit[0].id)) is None:
            rewriter.keep(unit[0])
        elif written.outputs:
            _emit(rewriter, written)
    return rewriter.finish(prune=True)


@dataclass(frozen=True, slots=True)
class Written:
    """A chain, and the nodes that it stands for; inputs are value ids, in the chain's order.

    Without outputs it is left out: whoever needs what it makes does that again.
    """

    nodes: Sequence[IRNode]
    inputs: list[int]
    outputs: list[IRValue]
    chain: Chain


class _Fuser:
    """Finds the chains of one graph."""

    def __init__(self, graph: IRGraph) -> None:
        self._graph = graph
        self._kept = {*graph.outputs, *graph.updates.values()}
        self._families = {n.id: f for n in graph.nodes if (f := family(graph, n)) is not None}
        self._holding = LivenessBound(graph)

    def found(self) -> dict[int, Written]:
        """Chains by the id of the first node in each."""
        every = [
            written.nodes
            for group in groups(self._graph, self._graph.nodes, self._fuses, self._kept)
            if group[0].id in self._families
            for written in self._chains(group, self._fuses_alike)
        ]
        chains = Recomputing(self._graph, every, self._families, self._kept, self._read, self._can)
        found = {}
        for done in chains.chains:
            written = self._written(done, chains.dropped)
            assert written is not None
            found[done.nodes[0].id] = written
        return found

    def _chains(self, group: list[IRNode], otherwise: Fuses | None) -> Iterator[Written]:
        """The chains of a group; where it is none, of what in it fuses ``otherwise``."""
        for part in self._parts(group):
            if not _is_worth_it(part):
                continue
            if (written := self._written(ChainNodes(part))) is not None:
                yield written
            elif otherwise is not None and len(part) > 1:
                for smaller in groups(self._graph, part, otherwise, self._kept):
                    yield from self._chains(smaller, None)

    def _fuses(self, value_id: int, user: IRNode) -> bool:
        value = self._graph.values[value_id]
        if value.producer is None or user.id not in self._families:
            return False
        maker = self._families.get(value.producer)
        return maker == self._families[user.id] and value.dtype in (maker.wide, "bool")

    def _fuses_alike(self, value_id: int, user: IRNode) -> bool:
        """Likewise, and what both make lies alike in memory."""
        values = self._graph.values
        made, read = values[user.outputs[0]], values[value_id]
        return self._fuses(value_id, user) and _sized_strides(made) == _sized_strides(read)

    def _parts(self, group: list[IRNode]) -> list[list[IRNode]]:
        """A group, or pieces of it one after another that are not too long or wide or late."""
        pieces: list[list[IRNode]] = [[]]
        for node in group:
            if pieces[-1] and not self._fits([*pieces[-1], node]):
                pieces.append([])
            pieces[-1].append(node)
        return [part for piece in pieces for part in self._holding.pieces(piece)]

    def _fits(self, nodes: Sequence[IRNode]) -> bool:
        made = self._made(nodes)
        return self._is_small(nodes, len(self._read(nodes)) + len(made))

    def _is_small(self, nodes: Sequence[IRNode], operands: int) -> bool:
        return operands <= WIDEST and sum(length(node) or 0 for node in nodes) <= LONGEST

    def _can(self, done: ChainNodes, dropped: Collection[int]) -> bool:
        """Whether a chain can do so much, where nobody stores some values."""
        written = self._written(done, dropped)
        if written is None:
            return False
        return self._is_small(done.every, len(written.inputs) + len(written.outputs))

    def _read(self, nodes: Sequence[IRNode]) -> list[int]:
        """The values that nodes read of others, without those that are literals."""
        made = {node.outputs[0] for node in nodes}
        every = dict.fromkeys(value_id for node in nodes for value_id in node.inputs)
        return [v for v in every if v not in made and literal(self._graph, v) is None]

    def _made(self, nodes: Sequence[IRNode]) -> list[int]:
        """The values that others read of nodes, or that nobody reads."""
        inside = {node.id for node in nodes}
        every = [node.outputs[0] for node in nodes]
        users = {v: self._graph.values[v].users for v in every}
        return [
            v for v in every if v in self._kept or not users[v] or not inside.issuperset(users[v])
        ]

    def _written(self, done: ChainNodes, dropped: Collection[int] = ()) -> Written | None:
        """The chain of a group, None where its results would lie in another way, or round so."""
        values = self._graph.values
        outputs = [values[v] for v in self._made(done.nodes) if v not in dropped]
        nodes = _needed(done.every, outputs)
        read = self._read(nodes)
        if not outputs:
            return Written(done.nodes, [], [], Chain((), ()))
        order = _order([values[value_id] for value_id in read], outputs)
        if order is None or not self._says_what_is_wide(nodes, read, outputs):
            return None
        inputs = [value.id for value in order]
        operands: dict[int, ChainOperand] = {v: ChainInput(i) for i, v in enumerate(inputs)}
        for value_id in (value_id for node in nodes for value_id in node.inputs):
            if (number := literal(self._graph, value_id)) is not None:
                operands[value_id] = number
        writer = ChainWriter(operands.__getitem__)
        for node in nodes:
            operands[node.outputs[0]] = self._result(writer, operands, node)
        numbers = [_number(writer, operands[value.id]) for value in outputs]
        chain = Chain(tuple(writer.instructions), tuple(numbers))
        check_chain(chain)
        return Written(done.nodes, inputs, outputs, chain)

    def _result(
        self, writer: ChainWriter, operands: Mapping[int, ChainOperand], node: IRNode
    ) -> ChainOperand:
        """What a node computes; a cast to another float is what it casts."""
        made = self._graph.values[node.outputs[0]]
        if node.op == CAST and made.dtype != "bool":
            return operands[node.inputs[0]]
        result = instructions(writer, node)
        assert result is not None
        return result

    def _says_what_is_wide(
        self, nodes: Sequence[IRNode], read: Sequence[int], outputs: Sequence[IRValue]
    ) -> bool:
        """Whether a chain with an inner f64 has an operand of f64, which makes it compute so."""
        values = self._graph.values
        inner = {values[node.outputs[0]].dtype for node in nodes}
        ends = [*(values[value_id] for value_id in read), *outputs]
        return "f64" not in inner or any(value.dtype == "f64" for value in ends)


def _is_worth_it(group: Sequence[IRNode]) -> bool:
    """Whether a chain is better than the nodes as they are."""
    (first, *others) = group
    if others or first.op not in _ALONE:
        return True
    return first.op == "aten.add.Tensor" and len(first.inputs) == 1


def _needed(nodes: Sequence[IRNode], outputs: Iterable[IRValue]) -> list[IRNode]:
    """Those of the nodes that the outputs need, in order."""
    needed = {value.id for value in outputs}
    found = []
    for node in reversed(nodes):
        if node.outputs[0] in needed:
            needed.update(node.inputs)
            found.append(node)
    return found[::-1]


def literal(graph: IRGraph, value_id: int) -> float | None:
    """The number that a value is in every run, where it is a constant of no dimension."""
    value = graph.values[value_id]
    if value.role != "constant" or value.shape or value.dtype not in ("f32", "f64"):
        return None
    tensor = graph.tensors.get(value_id)
    if tensor is None or tensor.is_meta or value_id in graph.updates:
        return None
    return math.nan if tensor.isnan() else float(tensor)


def _order(inputs: Sequence[IRValue], outputs: Sequence[IRValue]) -> list[IRValue] | None:
    """The inputs in an order that gives the outputs their strides, None where there is none.

    Of inputs that lie in different ways the first one decides.
    """
    wanted = _sized_strides(outputs[0])
    if not inputs or any(_sized_strides(value) != wanted for value in outputs):
        return None
    alike = [v for v in inputs if v.shape == outputs[0].shape and _sized_strides(v) == wanted]
    for order in ([*inputs], [*alike[:1], *(v for v in inputs if v not in alike[:1])]):
        given = [(value.shape, value.meta.full_strides) for value in order]
        found = result_strides(outputs[0].shape, given)
        if [s for s, size in zip(found, outputs[0].shape, strict=True) if size > 1] == wanted:
            return order
    return None


def _sized_strides(value: IRValue) -> list[int]:
    """The strides of dimensions with more than one element."""
    strides = value.meta.full_strides
    return [stride for stride, size in zip(strides, value.shape, strict=True) if size > 1]


def _number(writer: ChainWriter, operand: ChainOperand) -> int:
    """The instruction whose result an output is; one that leaves an input as it is, if need be."""
    if not isinstance(operand, ChainResult):
        writer.instructions.append(ChainInstruction("mul", (operand, 1.0)))
        return len(writer.instructions) - 1
    return operand.index


def _emit(rewriter: Rewriter, written: Written) -> None:
    attrs: dict[str, Any] = {
        "inputs": [Input(i) for i in range(len(written.inputs))],
        "program": str(written.chain),
        "dtypes": " ".join(value.dtype for value in written.outputs),
    }
    inputs = [rewriter.now(value_id) for value_id in written.inputs]
    rewriter.emit(CHAIN, inputs, written.outputs, attrs, written.nodes[-1])


# --- groups ---------------------------------------------------------------------------------------


Fuses = Callable[[int, IRNode], bool]
"""Whether a value, which a node makes, and a node that reads it may be in one group."""


def groups(
    graph: IRGraph, nodes: Sequence[IRNode], fuses: Fuses, kept: Collection[int]
) -> list[list[IRNode]]:
    """The nodes in groups, each in order; many of them alone.

    ``nodes`` are all of the graph, or such that no path between two of them leaves them. ``kept``
    are values that something beside the graph's nodes reads.
    """
    inside = {node.id: node for node in nodes}
    together = {
        node.id: [
            graph.values[value_id].producer
            for value_id in dict.fromkeys(node.inputs)
            if graph.values[value_id].producer in inside and fuses(value_id, node)
        ]
        for node in nodes
    }
    levels = _levels(graph, nodes, together)
    _wait(graph, nodes, together, levels, kept)
    root: dict[int, int] = {}

    def find(node_id: int) -> int:
        while root[node_id] != node_id:
            root[node_id] = root[root[node_id]]
            node_id = root[node_id]
        return node_id

    for node in nodes:
        root[node.id] = node.id
        for producer in together[node.id]:
            if producer is not None and levels[producer] == levels[node.id]:
                root[find(producer)] = node.id
    found: dict[int, list[IRNode]] = {}
    for node in nodes:
        found.setdefault(find(node.id), []).append(node)
    return list(found.values())


def _levels(
    graph: IRGraph, nodes: Sequence[IRNode], together: Mapping[int, Collection[int | None]]
) -> dict[int, int]:
    """A number for each node that rises along every edge that does not fuse."""
    levels: dict[int, int] = {}
    for node in nodes:
        level, fusing = 0, together[node.id]
        for value_id in node.inputs:
            producer = graph.values[value_id].producer
            if producer in levels:
                level = max(level, levels[producer] + (producer not in fusing))
        levels[node.id] = level
    return levels


def _wait(
    graph: IRGraph,
    nodes: Sequence[IRNode],
    together: Mapping[int, Collection[int | None]],
    levels: dict[int, int],
    kept: Collection[int],
) -> None:
    """Raise what one other node alone reads to its level, where that keeps no more alive."""
    for node in reversed(nodes):
        if len(node.outputs) != 1:
            continue
        made = graph.values[node.outputs[0]]
        if len(made.users) != 1 or made.id in kept or made.users[0] not in levels:
            continue
        (user,) = made.users
        held = [graph.values[value_id] for value_id in set(node.inputs)]
        size = sum(value.nbytes for value in held if value.role == "tmp")
        if node.id in together[user] and size <= made.nbytes:
            levels[node.id] = levels[user]


# --- the order of groups --------------------------------------------------------------------------


Unit = Sequence[IRNode]
"""Nodes that are done together, in the graph's order."""


def units(graph: IRGraph, groups: Sequence[Sequence[IRNode]]) -> list[Unit]:
    """All nodes, in units: the groups, and each other node alone, as early as their last nodes.

    Raises GraphError where two units need one another.
    """
    unit_of: dict[int, Unit] = {node.id: [node] for node in graph.nodes}
    for group in groups:
        unit_of |= {node.id: group for node in group}
    first = {node_id: unit[0].id for node_id, unit in unit_of.items()}
    makers = {value_id: first[node.id] for node in graph.nodes for value_id in node.outputs}
    place = {first[node.id]: k for k, node in enumerate(graph.nodes)}
    waiting = TopologicalSorter[int](dict.fromkeys(place, ()))
    for node in graph.nodes:
        needed = {makers[value_id] for value_id in node.inputs if value_id in makers}
        waiting.add(first[node.id], *needed - {first[node.id]})
    try:
        waiting.prepare()
    except CycleError as error:
        raise GraphError(f"groups need one another's results: {error.args[1]}") from None
    order: list[Unit] = []
    ready: list[tuple[int, int]] = []
    while waiting.is_active():
        for number in waiting.get_ready():
            heappush(ready, (place[number], number))
        _, number = heappop(ready)
        order.append(unit_of[number])
        waiting.done(number)
    return order
