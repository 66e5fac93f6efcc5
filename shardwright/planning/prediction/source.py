"""What is planned, whatever it is spread over: a forward, and what its nodes do with which values.

Comes in: a graph and its forward. Goes out: a `Forward`. What its nodes keep, hold and pass on is
told by `Places`: values at nodes, with their whole bytes, and where it shows in how many parts a
spread has them there. What always holds: nothing here depends on a mesh, so that of all meshes it
is worked out once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.autodiff.needed import needing_gradients, trained_parameters
from shardwright.costs.saved import saved_beside, saved_for_backward, view_bases, weight_residuals
from shardwright.ir import IRGraph
from shardwright.ir.repeats import Repeat, crossing_bytes, fingerprint, repeats
from shardwright.ops.bound import BoundDimop
from shardwright.ops.catalog import dimop_of
from shardwright.planning.plan import Split, Terms
from shardwright.planning.prediction.segments import Segment, segments
from shardwright.planning.step_graph import parameters_of

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Splits = tuple[Split | Terms | None, ...]

MOST, FIRST = 0, 1
"""Columns of a table of parts: the most of any input or output; the first input's.

Those of the other inputs and of the outputs follow the last.
"""


Row = tuple[int, int, float, int, int]
"""A row of `Places`: number, node, nbytes, at, column."""


class Pairs(NamedTuple):
    """Values and the nodes that do something with them: the same value may stand several times.

    ``number`` tells values apart, ``node`` is a position, ``size`` the value's bytes on a slot.
    """

    number: Integers
    node: Integers
    size: Floats

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, float]]) -> Pairs:
        """From (number, node, size)."""
        number, node, size = _columns(rows, 3)
        return cls(
            np.array(number, dtype=np.int64),
            np.array(node, dtype=np.int64),
            np.array(size, dtype=np.float64),
        )

    def where(self, which: NDArray[np.bool_]) -> Pairs:
        """Some of the rows."""
        return Pairs(self.number[which], self.node[which], self.size[which])


class Places(NamedTuple):
    """Values at nodes, whole.

    ``number`` and ``node`` are as in `Pairs`, ``nbytes`` those of the whole value. The parts that
    the value is in there are those of node ``at``, in ``column`` of a table of parts.
    """

    number: Integers
    node: Integers
    nbytes: Floats
    at: Integers
    column: Integers

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Places:
        """From rows of these."""
        number, node, nbytes, at, column = _columns(rows, 5)
        return cls(
            np.array(number, dtype=np.int64),
            np.array(node, dtype=np.int64),
            np.array(nbytes, dtype=np.float64),
            np.array(at, dtype=np.int64),
            np.array(column, dtype=np.int64),
        )

    def pairs(self, parts: Integers) -> Pairs:
        """The same on a slot; ``parts`` has a row for each node."""
        return Pairs(self.number, self.node, self.nbytes / self.parts(parts))

    def parts(self, parts: Integers) -> Integers:
        """In how many parts each is."""
        return np.asarray(parts[self.at, self.column], dtype=np.int64)


class Ways(NamedTuple):
    """How nodes come to what they keep: a reading for each view on the way, the nearest first.

    ``row`` is that of what is kept, ``readings`` the values as they are read, ``made`` as they were
    made.
    """

    row: Integers
    readings: Places
    made: Places

    @classmethod
    def of(cls, rows: Iterable[tuple[int, Row, Row]]) -> Ways:
        """From rows, each with the value as it is read, and as it was made."""
        found = [*rows]
        return cls(
            np.array([row for row, _, _ in found], dtype=np.int64),
            Places.of([read for _, read, _ in found]),
            Places.of([made for _, _, made in found]),
        )


def _columns(rows: Iterable[tuple[float, ...]], count: int) -> Iterable[tuple[float, ...]]:
    found = [*zip(*rows, strict=True)]
    return found or [()] * count


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
        marks = _marks(self.view)
        put(self, "kinds", _kinds(self.view, marks, self.needing))
        put(self, "repeats", repeats(marks, crossing_bytes(self.view)))
        put(self, "bases", view_bases(self.view))
        put(self, "position", {node.id: i for i, node in enumerate(self.view.nodes)})

    def bound(self, position: int) -> BoundDimop | None:
        """A node's annotation, looked up once for equal nodes."""
        kind = self.kinds[position]
        if kind not in self.bounds:
            self.bounds[kind] = dimop_of(self.view, self.view.nodes[position])
        return self.bounds[kind]

    @cached_property
    def segments(self) -> list[Segment]:
        """Repeated blocks, and what lies between them."""
        return segments(self.view, self.repeats, self.trained)

    @cached_property
    def holds(self) -> Holds:
        """What its nodes keep, hold and pass on."""
        return _Holding(self).run()


def _states(graph: IRGraph) -> dict[int, int]:
    found: dict[int, int] = {}
    for value_id, parameter in parameters_of(graph).items():
        if graph.values[value_id].role == "state":
            found[parameter] = found.get(parameter, 0) + graph.values[value_id].nbytes
    return found


def _marks(view: IRGraph) -> list[int]:
    """Equal for nodes that do the same."""
    known: dict[object, int] = {}
    return [known.setdefault(fingerprint(view, node), len(known)) for node in view.nodes]


def _kinds(view: IRGraph, marks: Sequence[int], needing: frozenset[int]) -> list[int]:
    known: dict[Hashable, int] = {}
    return [
        known.setdefault((mark, *(v in needing for v in node.inputs)), len(known))
        for mark, node in zip(marks, view.nodes, strict=True)
    ]


# --- what nodes hold ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Holds:
    """What the nodes of a forward keep, hold and pass on.

    block
        The number of each node's block: repeated layers, and what lies between them.
    saved
        What nodes' backwards read that is not stored, and what an operator keeps beside its
        tensors.
    ways
        By which views they come to it.
    waiting
        What gradients of parameters are made of that can be made apart from others: what nodes
        read, and gradients of what they make.
    crossing
        What a block keeps if all else in it is computed again: what it is given of other blocks,
        of outside the forward, or of stored values that the forward replaces.
    stored, gradient, state
        Stored values at their readers, and the whole bytes of their gradients and states.
    made, passed, answered, reread, fixed
        As in `Spread`.
    met
        Values of which several gradients come back, as often as these are added.
    again
        Which nodes are done again where only what crosses blocks is kept.
    rereading
        Which values nodes read in the backward too, if only that is kept.
    """

    block: Integers
    saved: Places
    ways: Ways
    waiting: Places
    crossing: Places
    stored: Places
    gradient: Floats
    state: Floats
    made: Integers
    passed: Places
    answered: NDArray[np.bool_]
    reread: NDArray[np.bool_]
    fixed: NDArray[np.bool_]
    met: Places
    again: NDArray[np.bool_]
    rereading: Rereading


@dataclass(slots=True)
class _Holding:
    """Works it out; `run` does."""

    source: Forward

    def run(self) -> Holds:
        source = self.source
        block = _blocks(source)
        saved, ways = self._saved()
        again = _again(source, saved, block)
        rereading = Rereading(source, saved, again, block)
        made, passed, answered = self._passed()
        stored, gradient, state = self._stored()
        rows = [*zip(passed.number.tolist(), passed.node.tolist(), strict=True)]
        return Holds(
            block=block,
            saved=saved,
            ways=ways,
            waiting=self._waiting(),
            crossing=self._crossing(rereading),
            stored=stored,
            gradient=gradient,
            state=state,
            made=made,
            passed=passed,
            answered=answered,
            reread=np.array([rereading(*row) for row in rows], dtype=bool),
            fixed=np.array([rereading.fixed(*row) for row in rows], dtype=bool),
            met=self._met(),
            again=again,
            rereading=rereading,
        )

    def _place(self, position: int, value_id: int) -> tuple[int, int]:
        """Where it shows in how many parts a value is that a node reads or makes."""
        inputs = self.source.view.nodes[position].inputs
        if value_id in inputs:
            return position, FIRST + inputs.index(value_id)
        return self._as_made(position, value_id)

    def _as_made(self, position: int, value_id: int) -> tuple[int, int]:
        node = self.source.view.nodes[position]
        return position, FIRST + len(node.inputs) + node.outputs.index(value_id)

    def _saved(self) -> tuple[Places, Ways]:
        source, rows, ways = self.source, list[Row](), list[tuple[int, Row, Row]]()
        if not source.training:
            return Places.of(()), Ways.of(())
        view = source.view
        beyond = max(view.values, default=0) + 1
        for i, node in enumerate(view.nodes):
            if i in source.prepare:
                continue
            for read in saved_for_backward(view, node, source.needing, {}):
                base = view.values[source.bases.get(read, read)]
                if not base.is_stored:
                    way = [*self._way(i, read)]
                    ways += [(len(rows), *reading) for reading in way]
                    rows.append((base.id, i, *way[-1][1][2:]))
            if beside := saved_beside(view, node, source.needing):
                rows.append((beyond + i, i, beside, i, MOST))
        return Places.of(rows), Ways.of(ways)

    def _way(self, position: int, value_id: int) -> Iterator[tuple[Row, Row]]:
        """What a node reads, what that is a view of, and so on: as it is read, and as made."""
        source = self.source
        value = source.view.values[value_id]
        read = value_id, position, value.nbytes, *self._place(position, value_id)
        if value.producer is None:
            yield read, read
            return
        maker = source.position[value.producer]
        yield read, (*read[:3], *self._as_made(maker, value_id))
        if (base := source.bases.get(value_id)) is not None:
            inputs = source.view.nodes[maker].inputs
            yield from self._way(maker, next(v for v in inputs if source.bases.get(v, v) == base))

    def _waiting(self) -> Places:
        source = self.source
        if not source.training:
            return Places.of(())
        found = weight_residuals(source.view, source.trained, source.needing, source.bases)
        return Places.of(
            (number, i, nbytes, *self._place(i, value_id))
            for number, i, value_id, nbytes in found
            if i not in source.prepare
        )

    def _crossing(self, rereading: Rereading) -> Places:
        source, rows = self.source, []
        if not source.training:
            return Places.of(())
        renewed, values = _renewed(source), source.view.values
        for i, node in enumerate(source.view.nodes):
            if i in source.prepare:
                continue
            given = [v for v in node.inputs if rereading.is_given(v, i) and rereading(v, i)]
            for value_id in given if renewed.isdisjoint(node.inputs) else [*given, *node.outputs]:
                base = values[source.bases.get(value_id, value_id)]
                if not base.is_stored:
                    rows.append((base.id, i, base.nbytes, *self._place(i, value_id)))
        return Places.of(rows)

    def _stored(self) -> tuple[Places, Floats, Floats]:
        source, rows, gradients, states = self.source, [], [], []
        for value in source.view.stored():
            for user in value.users:
                at = source.position[user]
                rows.append((value.id, at, value.nbytes, *self._place(at, value.id)))
                gradients.append(float(value.nbytes if value.id in source.trained else 0))
                states.append(float(source.states.get(value.id, 0)))
        return Places.of(rows), np.array(gradients), np.array(states)

    def _passed(self) -> tuple[Integers, Places, NDArray[np.bool_]]:
        """Values that other nodes read, as they were made."""
        source, rows, made, answered = self.source, [], [], []
        for i, node in enumerate(source.view.nodes):
            for value_id in node.outputs:
                value = source.view.values[value_id]
                for user in dict.fromkeys(value.users):
                    place = self._as_made(i, value_id)
                    rows.append((value_id, source.position[user], value.nbytes, *place))
                    made.append(i)
                    answered.append(value_id in source.needing and source.training)
        return np.array(made, dtype=np.int64), Places.of(rows), np.array(answered, dtype=bool)

    def _met(self) -> Places:
        """Values of which several gradients come back, at what makes them, once an addition."""
        source, rows, view = self.source, [], self.source.view
        for i, node in enumerate(view.nodes if source.training else ()):
            for value_id in source.needing.intersection(node.outputs):
                value = view.values[value_id]
                readers = (view.nodes[source.position[user]] for user in dict.fromkeys(value.users))
                count = sum(
                    reader.inputs.count(value_id)
                    for reader in readers
                    if not source.needing.isdisjoint(reader.outputs)
                )
                rows += [(value_id, i, value.nbytes, *self._as_made(i, value_id))] * (count - 1)
        return Places.of(rows)


def _blocks(source: Forward) -> Integers:
    """The number of each node's block."""
    cuts = np.zeros(len(source.view.nodes) + 1, dtype=np.int64)
    for repeat in source.repeats:
        cuts[repeat.cuts] = 1
    return np.cumsum(cuts)[:-1]


def _renewed(source: Forward) -> set[int]:
    """Stored values that the forward replaces: what reads them cannot be done again."""
    updates, values = source.whole.updates, source.view.values
    return {
        old for old, new in updates.items() if new in values and values[new].producer is not None
    }


def _again(source: Forward, saved: Places, block: Integers) -> NDArray[np.bool_]:
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


class Rereading:
    """Which values nodes read in the backward too, if only what crosses blocks is kept.

    A node's backward reads them, or it is done again; a view does for what reads it in its block.
    """

    def __init__(
        self, source: Forward, saved: Places, again: NDArray[np.bool_], block: Integers
    ) -> None:
        self._source, self._block = source, block.tolist()
        self._saved = set(zip(saved.number.tolist(), saved.node.tolist(), strict=True))
        self._again = set(np.flatnonzero(again).tolist())
        reads = [*self._saved]
        for i in self._again:
            reads += [(source.bases.get(v, v), i) for v in source.view.nodes[i].inputs]
        self._of_blocks = {(value_id, self._block[i]) for value_id, i in reads}

    def __call__(self, value_id: int, position: int) -> bool:
        """Whether a node reads a value, or what it is a view of, in the backward too."""
        if position in self._again:
            return True
        value_id = self._source.bases.get(value_id, value_id)
        if not self._source.bases.keys().isdisjoint(self._source.view.nodes[position].outputs):
            return (value_id, self._block[position]) in self._of_blocks
        return (value_id, position) in self._saved

    def fixed(self, value_id: int, reader: int) -> bool:
        """Whether a value is reread in the block that makes it, and its reader is in another."""
        producer = self._source.view.values[value_id].producer
        assert producer is not None
        own = self._block[self._source.position[producer]]
        base = self._source.bases.get(value_id, value_id)
        return bool(own != self._block[reader]) and (base, own) in self._of_blocks

    def is_given(self, value_id: int, reader: int) -> bool:
        """Whether a value comes to a node's block from elsewhere."""
        producer = self._source.view.values[value_id].producer
        if producer is None:
            return True
        at = self._source.position[producer]
        return at in self._source.prepare or bool(self._block[at] != self._block[reader])
