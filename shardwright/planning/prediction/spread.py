"""A forward over the inner axes of a mesh: what each node takes and holds on a slot.

Comes in: a graph, the axes of a stage's mesh and what they split of each node. Goes out: a
`Spread`, arrays with an entry a node, and lists of which values nodes keep, hold and pass on. From
these follows what any partition in stages takes and holds, by sums alone.

What always holds: nodes that do the same on values that lie the same cost the same, and are asked
for once.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.dimops.bound import BoundDimop
from shardwright.dimops.catalog import dimop_of
from shardwright.ir import IRGraph
from shardwright.ir.operators import is_marker
from shardwright.ir.repeats import Repeat, fingerprint, repeated_blocks
from shardwright.planning.parameters import parameters_of
from shardwright.planning.plan import Split, Terms
from shardwright.profiling.cost import Costs, NodeCost
from shardwright.profiling.gradients import needing_gradients, trained_parameters
from shardwright.profiling.operations import FREE
from shardwright.profiling.saved import saved_beside, saved_for_backward, view_bases

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Splits = tuple[Split | Terms | None, ...]


@dataclass(frozen=True)
class Forward:
    """What is planned, whatever it is spread over: a model, or the forward of a step.

    whole
        The graph that the forward is a part of; it has the markers.
    view
        The forward by itself.
    prepare
        Positions of nodes that run once a step.
    """

    whole: IRGraph
    view: IRGraph
    prepare: frozenset[int]
    training: bool
    trained: frozenset[int] = field(init=False)
    needing: frozenset[int] = field(init=False)
    """Values that a gradient goes through."""
    states: Mapping[int, int] = field(init=False)
    """Bytes of the optimizer's state, by parameter."""
    kinds: list[int] = field(init=False)
    """Equal for nodes that do the same and need the same gradients."""
    repeats: list[Repeat] = field(init=False)
    bases: Mapping[int, int] = field(init=False)
    """What views are views of."""
    position: Mapping[int, int] = field(init=False)
    """Of nodes, by their ids."""
    bounds: dict[int, BoundDimop | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        put = object.__setattr__
        trained = trained_parameters(self.whole) if self.training else frozenset[int]()
        put(self, "trained", trained)
        put(self, "needing", frozenset(needing_gradients(self.view, trained)))
        put(self, "states", _states(self.whole) if self.training else {})
        put(self, "kinds", _kinds(self.view, self.needing))
        put(self, "repeats", repeated_blocks(self.view))
        put(self, "bases", view_bases(self.view))
        put(self, "position", {node.id: i for i, node in enumerate(self.view.nodes)})

    def bound(self, position: int) -> BoundDimop | None:
        """A node's annotation, looked up once for equal nodes."""
        kind = self.kinds[position]
        if kind not in self.bounds:
            self.bounds[kind] = dimop_of(self.view, self.view.nodes[position])
        return self.bounds[kind]


def _states(graph: IRGraph) -> dict[int, int]:
    found: dict[int, int] = {}
    for value_id, parameter in parameters_of(graph).items():
        if graph.values[value_id].role == "state":
            found[parameter] = found.get(parameter, 0) + graph.values[value_id].nbytes
    return found


def _kinds(view: IRGraph, needing: frozenset[int]) -> list[int]:
    known: dict[Hashable, int] = {}
    return [
        known.setdefault(
            (fingerprint(view, node), tuple(v in needing for v in node.inputs)), len(known)
        )
        for node in view.nodes
    ]


class Pairs(NamedTuple):
    """Values and the nodes that do something with them: the same value may stand several times.

    ``number`` tells values apart, ``node`` is a position, ``size`` the value's bytes on a slot.
    """

    number: Integers
    node: Integers
    size: Floats

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, float]]) -> Pairs:
        """From (number, node, size)."""
        number, node, size = zip(*rows, strict=True) if rows else ((), (), ())
        return cls(
            np.array(number, dtype=np.int64),
            np.array(node, dtype=np.int64),
            np.array(size, dtype=np.float64),
        )


@dataclass(frozen=True)
class Spread:
    """What each node of a forward takes and holds on one slot of a stage's mesh.

    splits
        What the inner axes split of each node.
    forward, backward, weight
        Seconds for a microbatch, communication inside the mesh included.
    once
        Seconds once a step.
    saved
        What nodes' backwards read: values and the nodes that read them.
    crossing
        The values of which a block keeps a copy if all else in it is computed again.
    stored
        Parameters, buffers and constants, and the nodes that read them. ``gradient`` and ``state``
        are the bytes of their gradients and optimizer's states.
    made, passed
        Values that nodes make and others read: the position of the node that makes them, and the
        pairs with those that read them. ``answered`` says which have gradients, ``reread`` which
        are read in the backward too, if as much as can be is computed again, and ``fixed`` which
        are then kept where they are made: another block reads them, and their own once more.
    again
        Seconds that a node takes again in the backward if only what crosses blocks is kept.
    working
        Bytes that a node has in hand besides what is kept.
    fetched
        Values that communication inside the mesh brings, and the nodes that read them.
    """

    source: Forward
    axes: Mapping[str, int]
    splits: list[Splits]
    forward: Floats
    backward: Floats
    weight: Floats
    once: Floats
    saved: Pairs
    crossing: Pairs
    stored: Pairs
    gradient: Floats
    state: Floats
    made: Integers
    passed: Pairs
    answered: NDArray[np.bool_]
    reread: NDArray[np.bool_]
    fixed: NDArray[np.bool_]
    again: Floats
    working: Floats
    fetched: Pairs
    block: Integers
    """The number of each node's block: repeated layers, and what lies between them."""
    reasons: list[str]

    @property
    def slots(self) -> int:
        """Of a stage's mesh."""
        return math.prod(self.axes.values())

    @property
    def seconds(self) -> Floats:
        """What a microbatch takes of each node."""
        return self.forward + self.backward + self.weight


def spread(
    source: Forward,
    axes: Mapping[str, int],
    splits: Sequence[Splits],
    nodes: Sequence[NodeCost],
    once: Sequence[float],
    fetched: Sequence[tuple[int, int, float]] = (),
    reasons: Sequence[str] = (),
) -> Spread:
    """Put together what is known of nodes under these splits.

    ``fetched`` are values that communication brings: value, the node that reads it, bytes.
    """
    costs = np.array(nodes, dtype=np.float64).reshape(-1, 3)
    prepare = np.zeros(len(costs), dtype=bool)
    prepare[list(source.prepare)] = True
    if not source.training:
        costs[:, 1:] = 0
    parts = _Parts(source, axes, splits)
    block = _blocks(source)
    stored, gradient, state = _stored(source, parts)
    made, passed, answered = _passed(source, parts)
    saved = _saved(source, parts)
    again = _again(source, saved, block)
    reread = _Reread(source, saved, again, block)
    return Spread(
        source=source,
        axes=axes,
        splits=[*splits],
        forward=np.where(prepare, 0.0, costs[:, 0]),
        backward=np.where(prepare, 0.0, costs[:, 1]),
        weight=np.where(prepare, 0.0, costs[:, 2]),
        once=np.array(once, dtype=np.float64) + np.where(prepare, costs[:, 0], 0.0),
        saved=saved,
        crossing=_crossing(source, parts, reread, fetched),
        stored=stored,
        gradient=gradient,
        state=state,
        made=made,
        passed=passed,
        answered=answered,
        reread=np.array([*map(reread, passed.number.tolist(), passed.node.tolist())], dtype=bool),
        fixed=np.array([*map(reread.fixed, passed.number.tolist(), passed.node.tolist())], bool),
        again=np.where(again, costs[:, 0], 0.0),
        working=_working(source, parts),
        fetched=Pairs.of(fetched),
        block=block,
        reasons=[*reasons],
    )


def compute_costs(
    source: Forward, splits: Sequence[Splits], axes: Mapping[str, int], costs: Costs
) -> list[NodeCost]:
    """What nodes take on a slot, without communication; equal ones are asked for once."""
    known: dict[tuple[int, int], NodeCost] = {}
    found = []
    for i, node in enumerate(source.view.nodes):
        key = source.kinds[i], number_of_parts(splits[i], axes)
        if key not in known:
            known[key] = costs.node(source.whole, node, key[1])
        found.append(known[key])
    return found


def number_of_parts(splits: Splits, axes: Mapping[str, int]) -> int:
    """In how many parts a node is split."""
    pairs = zip(splits, axes.values(), strict=True)
    return math.prod(size for split, size in pairs if isinstance(split, Split))


# --- how many parts values are in -----------------------------------------------------------------


class _Parts:
    """In how many parts a slot's values are, at the nodes that read and make them."""

    def __init__(self, source: Forward, axes: Mapping[str, int], splits: Sequence[Splits]) -> None:
        self._source, self._axes, self._splits = source, axes, splits
        self._known: dict[Hashable, tuple[list[int], list[int]]] = {}
        self.made: dict[int, int] = {}
        """By value, as it was made."""
        for i, node in enumerate(source.view.nodes):
            self.made.update(zip(node.outputs, self.at(i)[1], strict=True))

    def at(self, position: int) -> tuple[list[int], list[int]]:
        """For each input and for each output of a node."""
        key = self._source.kinds[position], self._splits[position]
        if key not in self._known:
            self._known[key] = self._work_out(position)
        return self._known[key]

    def _work_out(self, position: int) -> tuple[list[int], list[int]]:
        node = self._source.view.nodes[position]
        inputs, outputs = [1] * len(node.inputs), [1] * len(node.outputs)
        for split, size in zip(self._splits[position], self._axes.values(), strict=True):
            if isinstance(split, Split) and size > 1:
                bound = self._source.bound(position)
                assert bound is not None
                flow = bound.flow(split.identifier)
                for counts, carries in ((inputs, flow.inputs), (outputs, flow.outputs)):
                    for i, carry in enumerate(carries):
                        counts[i] *= size if carry.kind == "shard" else 1
        return inputs, outputs

    def read(self, position: int, value_id: int) -> int:
        """Of a value at a node that reads or makes it, or a view of it."""
        node = self._source.view.nodes[position]
        inputs, outputs = self.at(position)
        if value_id in node.inputs:
            return inputs[node.inputs.index(value_id)]
        if value_id in node.outputs:
            return outputs[node.outputs.index(value_id)]
        return self.made.get(value_id, 1)


# --- what nodes hold ------------------------------------------------------------------------------


def _blocks(source: Forward) -> Integers:
    """The number of each node's block."""
    cuts = np.zeros(len(source.view.nodes) + 1, dtype=np.int64)
    for repeat in source.repeats:
        cuts[repeat.cuts] = 1
    return np.cumsum(cuts)[:-1]


def _stored(source: Forward, parts: _Parts) -> tuple[Pairs, Floats, Floats]:
    """Stored values at their readers; their gradients' and states' bytes there."""
    rows, gradients, states = [], [], []
    view = source.view
    for value in view.stored():
        for user in value.users:
            at = source.position[user]
            count = parts.read(at, value.id)
            rows.append((value.id, at, value.nbytes / count))
            gradients.append(value.nbytes / count if value.id in source.trained else 0.0)
            states.append(source.states.get(value.id, 0) / count)
    return Pairs.of(rows), np.array(gradients), np.array(states)


def _saved(source: Forward, parts: _Parts) -> Pairs:
    """What backwards read that is not stored; what an operator keeps beside its tensors too."""
    if not source.training:
        return Pairs.of(())
    view, rows = source.view, []
    beyond = max(view.values, default=0) + 1
    for i, node in enumerate(view.nodes):
        if i in source.prepare:
            continue
        for value_id in saved_for_backward(view, node, source.needing, source.bases):
            value = view.values[value_id]
            if not value.is_stored:
                rows.append((value_id, i, value.nbytes / parts.read(i, value_id)))
        if beside := saved_beside(view, node, source.needing):
            rows.append((beyond + i, i, beside / max(*parts.at(i)[0], *parts.at(i)[1])))
    return Pairs.of(rows)


def _crossing(
    source: Forward,
    parts: _Parts,
    reread: _Reread,
    fetched: Sequence[tuple[int, int, float]],
) -> Pairs:
    """What is kept where all else is computed again: what blocks are given, or slots sent.

    That comes from other blocks, from outside the forward, or of stored values that it replaces.
    """
    if not source.training:
        return Pairs.of(())
    rows = [row for row in fetched if reread(*row[:2])]
    renewed = _renewed(source)
    for i, node in enumerate(source.view.nodes):
        if i in source.prepare:
            continue
        given = [v for v in node.inputs if _is_given(source, v, reread.block, i) and reread(v, i)]
        for value_id in given if renewed.isdisjoint(node.inputs) else [*given, *node.outputs]:
            base = source.view.values[source.bases.get(value_id, value_id)]
            if not base.is_stored:
                rows.append((base.id, i, base.nbytes / parts.read(i, value_id)))
    return Pairs.of(rows)


def _is_given(source: Forward, value_id: int, block: Integers, reader: int) -> bool:
    """Whether a value comes to a node's block from elsewhere."""
    producer = source.view.values[value_id].producer
    if producer is None:
        return True
    at = source.position[producer]
    return at in source.prepare or bool(block[at] != block[reader])


def _renewed(source: Forward) -> set[int]:
    """Stored values that the forward replaces: what reads them cannot be done again."""
    updates, values = source.whole.updates, source.view.values
    return {
        old for old, new in updates.items() if new in values and values[new].producer is not None
    }


class _Reread:
    """Which values nodes read in the backward too, if only what crosses blocks is kept.

    A node's backward reads them, or it is done again; a view does for what reads it in its block.
    """

    def __init__(
        self, source: Forward, saved: Pairs, again: NDArray[np.bool_], block: Integers
    ) -> None:
        self._source, self.block = source, block
        self._saved = set(zip(saved.number.tolist(), saved.node.tolist(), strict=True))
        self._again = set(np.flatnonzero(again).tolist())
        reads = [*self._saved]
        for i in self._again:
            reads += [(source.bases.get(v, v), i) for v in source.view.nodes[i].inputs]
        self._of_blocks = {(value_id, int(block[i])) for value_id, i in reads}

    def __call__(self, value_id: int, position: int) -> bool:
        if position in self._again:
            return True
        value_id = self._source.bases.get(value_id, value_id)
        if self._source.view.nodes[position].op in FREE:
            return (value_id, int(self.block[position])) in self._of_blocks
        return (value_id, position) in self._saved

    def fixed(self, value_id: int, reader: int) -> bool:
        """Whether a value is reread in the block that makes it, and its reader is in another."""
        producer = self._source.view.values[value_id].producer
        assert producer is not None
        own = int(self.block[self._source.position[producer]])
        base = self._source.bases.get(value_id, value_id)
        return own != self.block[reader] and (base, own) in self._of_blocks


def _again(source: Forward, saved: Pairs, block: Integers) -> NDArray[np.bool_]:
    """Which nodes are done again where only what crosses blocks is kept.

    So are those of which the backward reads what they make beside their outputs.
    """
    again = np.zeros(len(source.view.nodes), dtype=bool)
    needed = set(saved.number.tolist())
    rows = zip(saved.number.tolist(), saved.node.tolist(), strict=True)
    beside = {i for number, i in rows if number not in source.view.values}
    for i in reversed(range(len(source.view.nodes))):
        node = source.view.nodes[i]
        inside = {v for v in node.outputs if v in needed and not _leaves(source, v, block)}
        if (inside or i in beside) and i not in source.prepare:
            again[i] = True
            needed.update(node.inputs)
    return again


def _leaves(source: Forward, value_id: int, block: Integers) -> bool:
    """Whether another block reads a value."""
    value = source.view.values[value_id]
    assert value.producer is not None
    at = block[source.position[value.producer]]
    return any(block[source.position[user]] != at for user in value.users)


def _passed(source: Forward, parts: _Parts) -> tuple[Integers, Pairs, NDArray[np.bool_]]:
    """Values that other nodes read, as they were made."""
    rows, made, answered = [], [], []
    for i, node in enumerate(source.view.nodes):
        for value_id in node.outputs:
            value = source.view.values[value_id]
            for user in dict.fromkeys(value.users):
                rows.append((value_id, source.position[user], value.nbytes / parts.made[value_id]))
                made.append(i)
                answered.append(value_id in source.needing and source.training)
    return np.array(made, dtype=np.int64), Pairs.of(rows), np.array(answered, dtype=bool)


def _working(source: Forward, parts: _Parts) -> Floats:
    """What nodes have in hand: what they make; in a backward gradients of that and of inputs."""
    view = source.view
    found = []
    for i, node in enumerate(view.nodes):
        inputs, outputs = parts.at(i)
        made = _bytes(view, node.outputs, outputs)
        if source.training and node.op not in FREE and not is_marker(node.op):
            needing = [v in source.needing for v in node.inputs]
            read = [v for v, wanted in zip(node.inputs, needing, strict=True) if wanted]
            counts = [count for count, wanted in zip(inputs, needing, strict=True) if wanted]
            made = max(made, made + _bytes(view, read, counts)) if read else made
        found.append(0.0 if node.op in FREE else made)
    return np.array(found)


def _bytes(view: IRGraph, value_ids: Sequence[int], parts: Sequence[int]) -> float:
    pairs = zip(value_ids, parts, strict=True)
    return sum(view.values[v].nbytes / count for v, count in pairs if not view.values[v].is_stored)
