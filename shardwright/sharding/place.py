"""The SPMD walk: in which layouts the values of a graph lie on a mesh, and what moves them there.

`place` goes through a graph whose nodes are split over a mesh, forward, and of a training step
backward and through the update, and lists every `Move`: a step of a redistribution of a value or of
its gradient, with the node that it is done for and the phase.

A value is brought to a layout once, from the cheapest that is held, and each step of the way is
kept. Stored values and inputs are loaded in any layout. Terms of a gradient that lie alike are
added where they are made, and each sum is brought to where its value was made: an all_gather of the
forward gets its reduce_scatter, an input that all devices read whole its all_reduce. Gradients of
parameters are brought together once a step, where the first reader has the parameter.

Nodes that are split alike, and whose values lie alike, are looked at once.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from shardwright.autodiff.needed import needing_gradients, trained_parameters
from shardwright.clusters import Cluster, Mesh
from shardwright.errors import PlanError
from shardwright.ir import IRGraph, IRNode, IRValue
from shardwright.ir.execute import describe_node
from shardwright.ir.repeats import fingerprint
from shardwright.ir.tensor_meta import itemsize
from shardwright.ops.bound import BoundDimop
from shardwright.ops.catalog import dimop_of
from shardwright.sharding.convert import RedistributionStep, convert
from shardwright.sharding.layout import Layout, Partial, Placements, Replicate, largest_shape
from shardwright.sharding.strategy import (
    NONE,
    CallShapes,
    Choices,
    Strategy,
    Terms,
    mirrored,
    normal,
    strategy,
)

# --- what does not depend on the mesh -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outline:
    """A graph's nodes by kind, and its values by who makes and reads them.

    kinds
        The kind of each node: equal operators, attributes, shapes, dtypes and needed gradients.
        ``bounds`` has an entry a kind.
    readers
        By value id: the position and input number of each read, in order.
    makers
        By value id: the position of the node that makes it.
    trained, required
        Parameters that are trained, and all values that their gradients go through.
    losses
        Results where gradients begin: numbers, or all results where there is none.
    has_gradient
        Of each node, whether it makes what has a gradient, so that it gives one to what it reads.
    """

    view: IRGraph
    kinds: tuple[int, ...]
    bounds: tuple[BoundDimop | None, ...]
    readers: dict[int, list[tuple[int, int]]]
    makers: dict[int, int]
    trained: frozenset[int]
    required: frozenset[int]
    losses: frozenset[int]
    has_gradient: tuple[bool, ...]

    def bound(self, position: int) -> BoundDimop | None:
        """The annotation of a node, None where it has none."""
        return self.bounds[self.kinds[position]]


KEPT = 8
"""How many graphs' outlines are kept: a search asks the same few again and again."""
_outlines: dict[int, tuple[weakref.ref[IRGraph], int, Outline]] = {}
"""The graph, how many nodes it had, and its outline, by the graph's id in memory.

None keeps the graph alive, or the tensors of its stored values.
"""


def outline_of(view: IRGraph, trained: frozenset[int] | None = None) -> Outline:
    """The outline of a graph that is complete.

    ``trained`` are its trained parameters, where it is the forward of a graph that says so.
    """
    if trained is None:
        trained = trained_parameters(view)
    graph, count, outline = _outlines.get(id(view), (None, 0, None))
    is_same = graph is not None and graph() is view and count == len(view.nodes)
    if is_same and outline is not None and outline.trained == trained:
        return outline
    made = _outline(view, trained)
    while len(_outlines) >= KEPT:
        del _outlines[next(iter(_outlines))]
    _outlines[id(view)] = weakref.ref(view), len(view.nodes), made
    return made


def _outline(view: IRGraph, trained: frozenset[int]) -> Outline:
    required = frozenset(needing_gradients(view, trained))
    numbers: dict[object, int] = {}
    kinds, bounds = [], []
    readers: dict[int, list[tuple[int, int]]] = {}
    makers: dict[int, int] = {}
    for position, node in enumerate(view.nodes):
        key = fingerprint(view, node), tuple(v in required for v in node.inputs)
        if key not in numbers:
            numbers[key] = len(numbers)
            bounds.append(dimop_of(view, node))
        kinds.append(numbers[key])
        for index, value_id in enumerate(node.inputs):
            readers.setdefault(value_id, []).append((position, index))
        makers |= dict.fromkeys(node.outputs, position)
    return Outline(
        replace(view, tensors={}),
        tuple(kinds),
        tuple(bounds),
        readers,
        makers,
        trained,
        required,
        _losses(view, required),
        tuple(not required.isdisjoint(node.outputs) for node in view.nodes),
    )


def _losses(view: IRGraph, required: frozenset[int]) -> frozenset[int]:
    ends = [value_id for value_id in view.outputs if value_id in required]
    return frozenset([v for v in ends if view.values[v].numel == 1] or ends)


# --- what was placed ------------------------------------------------------------------------------


Phase = Literal["forward", "updates", "backward", "once"]
"""``updates`` are new contents of stored values, behind the forward that makes them."""


class Move(NamedTuple):
    """One step of a redistribution: of which value, for which node, in which phase."""

    position: int
    phase: Phase
    value: int
    step: RedistributionStep


class Loaded(NamedTuple):
    """A stored value that a node is the first to read so, and its bytes on a device."""

    position: int
    value: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PlacedGraph:
    """A graph on a mesh: the strategy of each node, and all that is moved or loaded, in order."""

    outline: Outline
    mesh: Mesh
    training: bool
    strategies: Sequence[Strategy]
    moves: Sequence[Move]
    loads: Sequence[Loaded]


def place(
    outline: Outline,
    splits: Sequence[Choices],
    *,
    mesh: Mesh,
    cluster: Cluster,
    training: bool,
    microbatches: int = 1,
) -> PlacedGraph:
    """Place a graph whose nodes are split so. Raises PlanError where that cannot be."""
    return _Walk(outline, mesh, cluster, training, microbatches).run(splits)


def communications(moves: Iterable[Move]) -> Iterator[Move]:
    """The moves that are no slices, which each device makes by itself."""
    return (move for move in moves if move.step.kind != "slice")


# --- the walk -------------------------------------------------------------------------------------


Held = tuple[Placements, ...]
"""The layouts in which a value, or a term of a gradient, is held, the first one first."""
_Way = Sequence[RedistributionStep]


class _PlacedForward(NamedTuple):
    """What is done for a node's forward; the ways and the layouts are by input number."""

    strategy: Strategy
    ways: Sequence[tuple[int, _Way]]
    held: Sequence[tuple[int, Held]]
    loads: Sequence[tuple[int, Placements]]


class _PlacedBackward(NamedTuple):
    """What is done for a node's backward: ways by output number, new terms by input number."""

    ways: Sequence[tuple[int, _Way]]
    terms: Sequence[tuple[int, Held]]


@dataclass(slots=True)
class _Walk:
    """The state of the walk; `run` does it."""

    outline: Outline
    mesh: Mesh
    cluster: Cluster
    training: bool
    microbatches: int
    strategies: list[Strategy] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    loads: list[Loaded] = field(default_factory=list)
    held: dict[int, Held] = field(default_factory=dict)
    gradients: dict[int, Held] = field(default_factory=dict)
    """The layouts in which terms of a value's gradient lie."""
    first: dict[int, int] = field(default_factory=dict)
    """The first reader of each stored value."""
    known: dict[Hashable, _PlacedForward] = field(default_factory=dict)
    known_backward: dict[Hashable, _PlacedBackward] = field(default_factory=dict)
    sizes: dict[object, int] = field(default_factory=dict)

    def run(self, splits: Sequence[Choices]) -> PlacedGraph:
        """Walk forward, and in training backward and through the update."""
        nodes = self.outline.view.nodes
        for position, (node, found) in enumerate(zip(nodes, splits, strict=True)):
            self._forward(position, node, found)
        self._outputs()
        if self.training:
            whole = (Replicate(),) * self.mesh.ndim
            self.gradients = dict.fromkeys(self.outline.losses, (whole,))
            for position in reversed(range(len(nodes))):
                self._backward(position, nodes[position])
            self._update()
        return PlacedGraph(
            self.outline, self.mesh, self.training, self.strategies, self.moves, self.loads
        )

    # --- forward ------------------------------------------------------------------------------

    def _forward(self, position: int, node: IRNode, splits: Choices) -> None:
        held, values = self.held, self.outline.view.values
        whole = self._whole_axes(node) if self.training else None
        states = tuple(map(held.get, node.inputs))
        key = self.outline.kinds[position], splits, states, whole, _repeats(node.inputs)
        if key not in self.known:
            self.known[key] = self._placed(position, node, splits, whole)
        found = self.known[key]
        self.strategies.append(found.strategy)
        for index, way in found.ways:
            value_id = node.inputs[index]
            self.moves += [Move(position, "forward", value_id, step) for step in way]
        for index, state in found.held:
            held[node.inputs[index]] = state
        for index, wanted in found.loads:
            value_id = node.inputs[index]
            self.first.setdefault(value_id, position)
            nbytes = self._nbytes(values[value_id], wanted)
            self.loads.append(Loaded(position, value_id, nbytes))
        for value_id, made in zip(node.outputs, found.strategy.makes, strict=True):
            held[value_id] = (made,)

    def _placed(
        self, position: int, node: IRNode, splits: Choices, before: frozenset[int] | None
    ) -> _PlacedForward:
        """What is done for a node; ``before`` are the axes along which all before it is whole."""
        values = self.outline.view.values
        settled = self._settled(node, splits)
        whole = NONE
        if before is not None:
            whole = before & {axis for axis, split in enumerate(settled) if split is None}
        shapes = CallShapes(
            tuple(values[v].shape for v in node.inputs),
            tuple(values[v].shape for v in node.outputs),
        )
        bound = self.outline.bound(position)
        chosen = strategy(bound, shapes, self.mesh.sizes, settled, whole)
        if chosen is None:
            raise PlanError(
                f"{describe_node(node)} cannot be split as {settled} on the mesh {self.mesh}"
            )
        ways, loads, states = [], [], dict[int, Held]()
        for index, (value_id, wanted) in enumerate(zip(node.inputs, chosen.reads, strict=True)):
            held = states.get(value_id, self.held.get(value_id, ()))
            if wanted is None or wanted in held:
                continue
            if values[value_id].producer is None:
                states[value_id] = (*held, wanted)
                if values[value_id].is_stored:
                    loads.append((index, wanted))
                continue
            way, states[value_id] = self._way(values[value_id], held, wanted)
            ways.append((index, way))
        kept = [(node.inputs.index(v), state) for v, state in states.items()]
        return _PlacedForward(chosen, ways, kept, loads)

    def _settled(self, node: IRNode, splits: Choices) -> Choices:
        """The splits, where terms are gone on with only where they lie."""
        return tuple(
            None
            if isinstance(split, Terms)
            and not all(self._in_terms(node.inputs[i], axis) for i in split.inputs)
            else split
            for axis, split in enumerate(splits)
        )

    def _in_terms(self, value_id: int, axis: int) -> bool:
        held = self.held.get(value_id, ())
        return bool(held) and all(placements[axis] == Partial() for placements in held)

    def _whole_axes(self, node: IRNode) -> frozenset[int]:
        """The axes along which all that a node reads, and that has a gradient, is done whole."""
        found = frozenset(range(self.mesh.ndim))
        for value_id in node.inputs:
            if value_id in self.outline.required and value_id in self.outline.makers:
                found &= self.strategies[self.outline.makers[value_id]].whole
        return found

    def _outputs(self) -> None:
        """Results come out without terms; new contents where the old ones lie."""
        view = self.outline.view
        for value_id in dict.fromkeys(view.outputs):
            held = self.held.get(value_id, ())
            if held and all(self._has_terms(placements) for placements in held):
                phase: Phase = "forward"
                if self.training and self.microbatches > 1 and not view.values[value_id].shape:
                    phase = "once"
                self._bring(value_id, (Replicate(),) * self.mesh.ndim, phase)
        for old, new in view.updates.items():
            for wanted in self.held.get(old, ()):
                if new in self.outline.makers:
                    self._bring(new, wanted, "updates")

    def _has_terms(self, placements: Placements) -> bool:
        return bool(Layout(placements).partial_axes(self.mesh))

    def _bring(self, value_id: int, wanted: Placements, phase: Phase) -> None:
        """Bring a value that a node makes to a layout, for that node."""
        held = self.held[value_id]
        if wanted not in held:
            way, self.held[value_id] = self._way(self.outline.view.values[value_id], held, wanted)
            position = self.outline.makers[value_id]
            self.moves += [Move(position, phase, value_id, step) for step in way]

    # --- backward -----------------------------------------------------------------------------

    def _backward(self, position: int, node: IRNode) -> None:
        given = tuple(map(self.gradients.get, node.outputs))
        if not any(given):
            return
        chosen = self.strategies[position]
        before = tuple(map(self.gradients.get, node.inputs))
        key = id(chosen), given, before, _repeats(node.inputs)
        if key not in self.known_backward:
            self.known_backward[key] = self._placed_backward(node, chosen)
        found = self.known_backward[key]
        for index, way in found.ways:
            value_id = node.outputs[index]
            self.moves += [Move(position, "backward", value_id, step) for step in way]
        for index, terms in found.terms:
            self.gradients[node.inputs[index]] = terms

    def _placed_backward(self, node: IRNode, chosen: Strategy) -> _PlacedBackward:
        values = self.outline.view.values
        kept = self._kept(node, chosen)
        ways = [
            (index, way)
            for index, value_id in enumerate(node.outputs)
            for made in self.gradients.get(value_id, ())
            for way, _ in [
                self._way(values[value_id], (made,), mirrored(chosen.makes[index], kept))
            ]
        ]
        distinct: dict[tuple[int, Placements], int] = {}
        for index, (value_id, read) in enumerate(zip(node.inputs, chosen.reads, strict=True)):
            if value_id in self.outline.required and read is not None:
                distinct.setdefault((value_id, read), index)
        found: dict[int, Held] = {}
        for (value_id, _), index in distinct.items():
            made = chosen.returns[index]
            assert made is not None
            terms = tuple(Partial() if axis in kept else p for axis, p in enumerate(made))
            layout = normal(terms, self.mesh.sizes, values[value_id].shape)
            before = found.get(value_id, self.gradients.get(value_id, ()))
            found[value_id] = before if layout in before else (*before, layout)
        return _PlacedBackward(ways, [(node.inputs.index(v), terms) for v, terms in found.items()])

    def _kept(self, node: IRNode, chosen: Strategy) -> frozenset[int]:
        """The axes along which a node goes on with terms of its gradients."""
        groups = [g for v in node.outputs for g in self.gradients.get(v, ())]
        return frozenset(
            axis for axis in chosen.whole if all(group[axis] == Partial() for group in groups)
        )

    # --- once a step --------------------------------------------------------------------------

    def _update(self) -> None:
        """Gradients of parameters are put together, and copies of parameters renewed."""
        for value_id in sorted(self.outline.trained & self.gradients.keys()):
            value, position = self.outline.view.values[value_id], self.first[value_id]
            home, *copies = self.held[value_id]
            for made in self.gradients[value_id]:
                way, _ = self._way(value, (made,), home)
                self.moves += [Move(position, "once", value_id, step) for step in way]
            held: Held = (home,)
            for wanted in copies:
                if wanted not in held:
                    way, held = self._way(value, held, wanted)
                    self.moves += [Move(position, "once", value_id, step) for step in way]

    # --- redistribution -----------------------------------------------------------------------

    def _nbytes(self, value: IRValue, placements: Placements) -> int:
        key = value.shape, value.dtype, placements
        if key not in self.sizes:
            largest = largest_shape(placements, self.mesh.sizes, value.shape)
            self.sizes[key] = math.prod(largest) * itemsize(value.dtype)
        return self.sizes[key]

    def _way(self, value: IRValue, held: Held, wanted: Placements) -> tuple[_Way, Held]:
        """The steps from the cheapest layout that is held, and what is held then: each step is."""
        if wanted in held:
            return (), held
        ways = [self._steps(value, source, wanted) for source in held]
        _, cheapest = min((sum(step.seconds for step in way), i) for i, way in enumerate(ways))
        new = [step for step in ways[cheapest] if step.after.placements not in held]
        return new, (*held, *(step.after.placements for step in new))

    def _steps(self, value: IRValue, source: Placements, wanted: Placements) -> _Way:
        return convert(
            Layout(source),
            Layout(wanted),
            mesh=self.mesh,
            shape=value.shape,
            itemsize=itemsize(value.dtype),
            cluster=self.cluster,
        ).steps


def _repeats(value_ids: Sequence[int]) -> tuple[int, ...]:
    """Which of a node's inputs are the same value, where any are."""
    if len({*value_ids}) == len(value_ids):
        return ()
    return tuple(map([*value_ids].index, value_ids))
