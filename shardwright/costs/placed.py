"""What each node of a placed graph takes, makes and reads on one device, as arrays.

A storage is memory that a value, what a redistribution brings, or a gradient lies in; views lie in
what they are views of. Nothing here depends on how the graph is cut in stages: that is summed up in
`stage`. `storages` lists it from the placed graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.autodiff.backward import BackwardGraph, backward_of
from shardwright.costs.roofline import FREE, moves_nothing
from shardwright.ir import IRGraph, IRNode
from shardwright.ir.repeats import crossing_bytes, repeats
from shardwright.sharding.place import Outline, outline_of
from shardwright.sharding.strategy import Choices

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Bools = NDArray[np.bool_]

FORWARD, AGAIN, BACKWARD, ADD, WEIGHT = range(5)
"""The passes of a node: its forward, the forward once more, its backward, the addition of what that
gives to what others gave, its weight gradients."""


@dataclass(frozen=True)
class Forward:
    """What is planned, whatever it is placed on: a model, or the forward of a step.

    whole
        The graph that the forward is a part of; it has the markers.
    view
        The forward by itself.
    prepare
        Positions of nodes that run once a step.
    trained
        The parameters that are trained.
    states
        Bytes of the optimizer's state, by parameter.
    """

    whole: IRGraph
    view: IRGraph
    prepare: frozenset[int] = frozenset()
    training: bool = False
    trained: frozenset[int] = frozenset()
    states: Mapping[int, int] = field(default_factory=dict)

    @cached_property
    def outline(self) -> Outline:
        """Its nodes by kind, its values by who makes and reads them."""
        return outline_of(self.view, self.trained)

    def backward(self, position: int) -> BackwardGraph | None:
        """The recorded backward of a node; None where none is needed."""
        if position not in self._backwards:
            self._backwards[position] = self._backward_of(self.view.nodes[position])
        return self._backwards[position]

    @cached_property
    def _backwards(self) -> dict[int, BackwardGraph | None]:
        return {}

    def _backward_of(self, node: IRNode) -> BackwardGraph | None:
        if not self.training or self.outline.required.isdisjoint(node.outputs):
            return None
        late = {v for v in node.inputs if self.bases.get(v, v) in self.trained}
        return backward_of(self.view, node, self.outline.required, late)

    @cached_property
    def bases(self) -> Mapping[int, int]:
        """What views are views of."""
        return view_bases(self.view)

    @cached_property
    def block(self) -> Integers:
        """The number of each node's block: repeated layers, and what lies between them."""
        cuts = np.zeros(len(self.view.nodes) + 1, dtype=np.int64)
        for repeat in repeats(self.outline.kinds, crossing_bytes(self.view)):
            cuts[repeat.cuts] = 1
        return np.cumsum(cuts)[:-1]

    @cached_property
    def replaced(self) -> frozenset[int]:
        """Stored values that the forward replaces: what reads them cannot be done again."""
        updates, values = self.whole.updates, self.view.values
        return frozenset(
            old
            for old, new in updates.items()
            if new in values and values[new].producer is not None
        )


class Passed(NamedTuple):
    """Values that nodes make and others read, a row for each reader; bytes as they are made."""

    value: Integers
    maker: Integers
    reader: Integers
    size: Floats
    has_gradient: Bools


class Stored(NamedTuple):
    """Parameters, buffers and constants at the nodes that read them; bytes on a device.

    ``number`` tells apart values and the layouts in which they are read.
    """

    number: Integers
    node: Integers
    size: Floats
    gradient: Floats
    state: Floats


class Moved(NamedTuple):
    """Communication of activations and their gradients, a row for each node that gives to it.

    number
        Rows with the same number are one communication where their givers are in one stage.
    node, work
        Before which node's pass it is done.
    giver, sums
        A node that has made what is sent. Terms of a sum are added in its stage, wherever the
        ``node`` is: between stages sums are sent.
    seconds, sent, storage
        How long it takes, the bytes that a member sends from, and what comes of it.
    """

    number: Integers
    node: Integers
    work: Integers
    giver: Integers
    sums: Bools
    seconds: Floats
    sent: Floats
    storage: Integers

    def in_stages(self, stages: Integers) -> Moved:
        """Each communication once in each stage that does it, before a node of that stage."""
        at = np.where(self.sums, stages[self.giver], stages[self.node])
        rows = first_of_each(at, self.number)
        node = np.where(at == stages[self.node], self.node, self.giver)
        return Moved(
            self.number[rows],
            node[rows],
            self.work[rows],
            self.giver[rows],
            self.sums[rows],
            self.seconds[rows],
            self.sent[rows],
            self.storage[rows],
        )


class Reduction(NamedTuple):
    """A communication of a parameter's gradient once a step: for the first node that reads it."""

    node: int
    seconds: float
    nbytes: float


@dataclass(frozen=True)
class PlacedCosts:
    """What each node takes, makes and reads on a device of its mesh.

    splits
        What the inner axes split of each node.
    seconds
        A row for each node: forward, backward, weight gradients; without communication.
    moved
        Communication before forwards and backwards.
    storage, node, work
        Which storages are made or read, by which node, in which of its passes.
    size, maker
        Of each storage: bytes, and the position of the node that makes it.
    again
        Nodes that are done again where only what crosses blocks is kept, and, of each storage,
        whether it is then made again.
    """

    source: Forward
    splits: Sequence[Choices]
    seconds: Floats
    moved: Moved
    storage: Integers
    node: Integers
    work: Integers
    size: Floats
    maker: Integers
    again: Bools
    redone: Bools
    passed: Passed
    stored: Stored
    inputs: Floats
    """Rows of (value, node, bytes, whether its backward does) of the inputs that nodes read."""
    reductions: Sequence[Reduction]
    renewals: Sequence[Reduction]
    """Communication of new contents of stored values, behind the forward that makes them."""
    reasons: Sequence[str] = ()

    @property
    def total(self) -> Floats:
        """What a microbatch takes of each node, communication included."""
        found = self.seconds.sum(axis=1) + self.lines.sum(axis=1)
        for renewal in self.renewals:
            found[renewal.node] += renewal.seconds
        return np.asarray(found)

    @cached_property
    def lines(self) -> Floats:
        """Seconds of the communication before each node's forward, and before its backward."""
        moved = self.moved.in_stages(np.zeros(len(self.seconds), dtype=np.int64))
        found = np.zeros((len(self.seconds), 2))
        np.add.at(found, (moved.node, (moved.work == BACKWARD) * 1), moved.seconds)
        return found

    def kept_rows(self, *, again: bool) -> Integers:
        """The rows in which backwards read what forwards made, and is not done ``again``."""
        is_forward = np.zeros(len(self.size), dtype=bool)
        is_forward[self.storage[self.work == FORWARD]] = True
        read = (self.work >= BACKWARD) & is_forward[self.storage]
        if again:
            read &= ~self.redone[self.storage]
        return np.flatnonzero(read)

    @cached_property
    def once(self) -> Floats:
        """Seconds of each node once a step: what is prepared, and gradients put together."""
        found = np.zeros(len(self.seconds))
        prepare = [*self.source.prepare]
        found[prepare] = self.seconds[prepare, 0]
        for reduction in self.reductions:
            found[reduction.node] += reduction.seconds
        return found


def first_of_each(groups: Integers, numbers: Integers) -> Integers:
    """The first row of each number in each group."""
    key = groups * (int(numbers.max(initial=0)) + 1) + numbers
    _, first = np.unique(key, return_index=True)
    return np.asarray(first, dtype=np.int64)


# --- what a backward reads of its forward ---------------------------------------------------------


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
