"""A forward over the inner axes of a mesh: what each node takes and holds on a slot.

Comes in: a `Forward`, the axes of a stage's mesh and what they split of each node. Goes out: a
`Spread`, arrays with an entry a node, and lists of which values nodes keep, hold and pass on. From
these follows what any partition in stages takes and holds, by sums alone.

What always holds: nodes that do the same on values that lie the same cost the same, and are asked
for once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.costs.cost import Costs, NodeCost
from shardwright.costs.operations import FREE
from shardwright.ir import IRGraph
from shardwright.ir.operators import is_marker
from shardwright.planning.plan import Split
from shardwright.planning.prediction.brought import with_brought
from shardwright.planning.prediction.source import (
    FIRST,
    Floats,
    Forward,
    Integers,
    Pairs,
    Splits,
)
from shardwright.sharding.strategy import WHOLE, Part


@dataclass(frozen=True)
class Spread:
    """What each node of a forward takes and holds on one slot of a stage's mesh.

    splits
        What the inner axes split of each node.
    forward, backward, weight
        Seconds for a microbatch, communication inside the mesh included.
    once, gathered
        Seconds once a step; and how many communications put gradients together then.
    saved
        What nodes' backwards read: values and the nodes that read them.
    waiting
        What gradients of parameters are made of that are made apart from others.
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
        Bytes that a node has in hand besides what is kept, and in the backward those of gradients
        that are on their way past it.
    fetched
        Values that communication inside the mesh brings, and the nodes in whose stage it does: of
        terms of a sum the node that makes them, for sums are sent, else the one that reads them.
    """

    source: Forward
    axes: Mapping[str, int]
    splits: list[Splits]
    forward: Floats
    backward: Floats
    weight: Floats
    once: Floats
    gathered: Floats
    saved: Pairs
    waiting: Pairs
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
    nodes: Floats,
    once: Floats,
    gathered: Floats,
    groups: Alike,
    fetched: Sequence[tuple[int, int, float]] = (),
    reasons: Sequence[str] = (),
) -> Spread:
    """Put together what is known of nodes under these splits.

    ``fetched`` are values that communication brings: value, the node that reads it, bytes.
    """
    prepare = np.zeros(len(nodes), dtype=bool)
    prepare[list(source.prepare)] = True
    costs = nodes if source.training else nodes * (1.0, 0.0, 0.0)
    holds = source.holds
    parts = groups.parts[groups.number]
    count = holds.stored.parts(parts)
    passed = holds.passed.pairs(parts)
    return Spread(
        source=source,
        axes=axes,
        splits=[*splits],
        forward=np.where(prepare, 0.0, costs[:, 0]),
        backward=np.where(prepare, 0.0, costs[:, 1]),
        weight=np.where(prepare, 0.0, costs[:, 2]),
        once=once + np.where(prepare, costs[:, 0], 0.0),
        gathered=gathered,
        saved=with_brought(holds.saved.pairs(parts), holds.ways, parts, fetched),
        waiting=holds.waiting.pairs(parts),
        crossing=_crossing(source, holds.crossing.pairs(parts), fetched),
        stored=holds.stored.pairs(parts),
        gradient=holds.gradient / count,
        state=holds.state / count,
        made=holds.made,
        passed=passed,
        answered=holds.answered,
        reread=holds.reread,
        fixed=holds.fixed,
        again=np.where(holds.again, costs[:, 0], 0.0),
        working=_working(source, groups) + _passing(holds.made, passed, holds.answered, len(parts)),
        fetched=Pairs.of(_brought_at(source, parts, row) for row in fetched),
        block=holds.block,
        reasons=[*reasons],
    )


@dataclass(frozen=True, slots=True)
class Alike:
    """Groups of nodes of one kind that are split alike.

    ``number`` is the group of each node, ``first`` the first node of each group, and ``parts`` a
    row for each: in how many parts a slot has its values, in the columns of `source`.
    """

    number: Integers
    first: list[int]
    parts: Integers

    @classmethod
    def of(cls, source: Forward, axes: Mapping[str, int], splits: Sequence[Splits]) -> Alike:
        """The groups of a forward's nodes under these splits."""
        known: dict[tuple[int, Splits], int] = {}
        keys = zip(source.kinds, splits, strict=True)
        number = np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int64)
        _, first = np.unique(number, return_index=True)
        rows = [_parts_at(source, axes, splits[i], i) for i in first.tolist()]
        parts = np.ones((len(rows), max(map(len, rows), default=FIRST)), dtype=np.int64)
        for row, found in zip(parts, rows, strict=True):
            row[: len(found)] = found
        return cls(number, first.tolist(), parts)


def compute_costs(
    source: Forward,
    splits: Sequence[Splits],
    axes: Mapping[str, int],
    costs: Costs,
    groups: Alike,
) -> Floats:
    """What nodes take on a slot, without communication; equal ones are asked for once.

    A row for each node: forward, backward, weight.
    """
    known: dict[tuple[int, Part], NodeCost] = {}
    found = []
    for i in groups.first:
        key = source.kinds[i], part_of(source, splits[i], axes, i)
        if key not in known:
            known[key] = costs.node(source.whole, source.view.nodes[i], key[1])
        found.append(known[key])
    return np.array(found, dtype=np.float64).reshape(-1, 3)[groups.number]


def part_of(source: Forward, splits: Splits, axes: Mapping[str, int], position: int) -> Part:
    """What the slot with the most of a node has of it."""
    cuts = [*_cuts(splits, axes)]
    bound = source.bound(position) if cuts else None
    if bound is None:
        return WHOLE
    node, work, left = source.view.nodes[position], 1.0, dict[str, int]()
    shapes = [[*source.view.values[v].shape] for v in (*node.inputs, *node.outputs)]
    for split, size in cuts:
        flow, name = bound.flow(split.identifier), split.identifier
        before = left.get(name, bound.length(name) // split.unit)
        left[name] = math.ceil(before / size)
        work *= before / left[name]
        for shape, carry in zip(shapes, (*flow.inputs, *flow.outputs), strict=True):
            if carry.kind == "shard" and carry.dim is not None:
                shape[carry.dim] = left[name] * split.unit * carry.unit
    return Part(work, tuple(map(tuple, shapes)))


def _cuts(splits: Splits, axes: Mapping[str, int]) -> Iterator[tuple[Split, int]]:
    """What is cut, and in how many parts."""
    for split, size in zip(splits, axes.values(), strict=True):
        if isinstance(split, Split) and size > 1:
            yield split, size


def _parts_at(source: Forward, axes: Mapping[str, int], splits: Splits, position: int) -> list[int]:
    """The most of any value, and the parts of each input and of each output."""
    node = source.view.nodes[position]
    inputs, outputs = [1] * len(node.inputs), [1] * len(node.outputs)
    for split, size in _cuts(splits, axes):
        bound = source.bound(position)
        assert bound is not None
        flow = bound.flow(split.identifier)
        for counts, carries in ((inputs, flow.inputs), (outputs, flow.outputs)):
            for i, carry in enumerate(carries):
                counts[i] *= size if carry.kind == "shard" else 1
    return [max((*inputs, *outputs), default=1), *inputs, *outputs]


# --- what nodes hold ------------------------------------------------------------------------------


def _crossing(source: Forward, given: Pairs, fetched: Sequence[tuple[int, int, float]]) -> Pairs:
    """What is kept where all else is computed again: what blocks are given, or slots sent."""
    if not source.training:
        return given
    rereading = source.holds.rereading
    sent = Pairs.of([row for row in fetched if rereading(row[0], row[1])])
    return Pairs(*(np.concatenate(columns) for columns in zip(sent, given, strict=True)))


def _brought_at(
    source: Forward, parts: Integers, row: tuple[int, int, float]
) -> tuple[int, int, float]:
    """A row of what is fetched, with the node in whose stage that is."""
    value_id, reader, nbytes = row
    value = source.view.values[value_id]
    assert value.producer is not None, "what is stored or given is loaded as it is read"
    maker = source.position[value.producer]
    node = source.view.nodes[maker]
    count = parts[maker, FIRST + len(node.inputs) + node.outputs.index(value_id)]
    return value_id, maker if nbytes <= value.nbytes / count else reader, nbytes


def _working(source: Forward, groups: Alike) -> Floats:
    """What nodes have in hand: what they make; in a backward gradients of that and of inputs."""
    rows = zip(groups.first, groups.parts.tolist(), strict=True)
    found = [_in_hand(source, parts, i) for i, parts in rows]
    return np.array(found, dtype=np.float64)[groups.number]


def _passing(made: Integers, passed: Pairs, answered: NDArray[np.bool_], count: int) -> Floats:
    """Bytes of gradients that are there while a node's backward runs, of what it does not touch.

    A gradient is there from the backward of the last node that reads a value to that of its maker.
    """
    rows = np.flatnonzero(answered)
    numbers, inverse = np.unique(passed.number[rows], return_inverse=True)
    last = np.zeros(len(numbers), dtype=np.int64)
    np.maximum.at(last, inverse, passed.node[rows])
    first, size = np.empty_like(last), np.zeros(len(numbers))
    first[inverse], size[inverse] = made[rows], passed.size[rows]
    begins = np.bincount(first + 1, weights=size, minlength=count + 1)
    ends = np.bincount(last, weights=size, minlength=count + 1)
    return np.asarray(np.cumsum(begins - ends)[:count], dtype=np.float64)


def _in_hand(source: Forward, parts: Sequence[int], position: int) -> float:
    view = source.view
    node = view.nodes[position]
    last = FIRST + len(node.inputs)
    made = _bytes(view, node.outputs, parts[last : last + len(node.outputs)])
    if not source.training or is_marker(node.op):
        return 0.0 if node.op in FREE else made
    wanting = [
        (v, count)
        for v, count in zip(node.inputs, parts[FIRST:last], strict=True)
        if v in source.needing
    ]
    given = _bytes(view, [v for v, _ in wanting], [count for _, count in wanting])
    if node.op in FREE:  # a part's gradient is put in zeros and added to those of other parts
        return 2 * given if made < given else 0.0
    return made + given


def _bytes(view: IRGraph, value_ids: Sequence[int], parts: Sequence[int]) -> float:
    pairs = zip(value_ids, parts, strict=True)
    return sum(view.values[v].nbytes / count for v, count in pairs if not view.values[v].is_stored)
