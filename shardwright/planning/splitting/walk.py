"""The communication that a choice of splits takes, step by step, as `building` writes it.

Comes in: a forward view, a strategy for each of its nodes, and a mesh. Goes out: every `Move`: a
conversion step of a value, or of its gradient, with the node that it is done for and the phase.

It walks as `building` does, on layouts alone. A value is brought to a layout once, from the
cheapest that is held, and each step of the way is kept. A gradient's terms are added where they are
made alike, and each sum is brought to where its value was made. Gradients of parameters are brought
together once a step, where the first reader has the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from shardwright.clusters import Cluster, Mesh
from shardwright.errors import PlanError
from shardwright.ir import IRNode, IRValue
from shardwright.ir.dtypes import itemsize
from shardwright.ir.execute import describe_node
from shardwright.planning.plan import Terms
from shardwright.planning.splitting.outline import Outline
from shardwright.planning.splitting.strategies import (
    NONE,
    CallShapes,
    Choices,
    Strategy,
    mirrored,
    normal,
    strategy,
)
from shardwright.sharding import Layout, Partial, RedistributionStep, Replicate, convert
from shardwright.sharding.layout import largest_shape
from shardwright.sharding.placement import Placements

Phase = Literal["forward", "backward", "once"]
Key = tuple[Literal["value", "gradient", "new"], int, int]
"""What is held: a value, a term of its gradient by number, or a parameter's new contents."""


class Move(NamedTuple):
    """One step of a conversion: of which value, for which node, in which phase."""

    position: int
    phase: Phase
    value: int
    step: RedistributionStep


class Loaded(NamedTuple):
    """A stored value that a node is the first to read so, and its bytes on a slot."""

    position: int
    value: int
    nbytes: int


@dataclass(slots=True)
class SplitWalk:
    """What was found on the way through a graph."""

    outline: Outline
    mesh: Mesh
    cluster: Cluster
    training: bool
    microbatches: int = 1
    strategies: list[Strategy] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    loads: list[Loaded] = field(default_factory=list)
    held: dict[Key, list[Placements]] = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)
    """The first reader of each stored value."""
    known: dict[object, Strategy | None] = field(default_factory=dict)
    """Strategies of nodes of one kind that are split alike."""
    sizes: dict[object, int] = field(default_factory=dict)
    """Bytes that a slot holds of values that are alike."""
    gradients: dict[int, dict[Placements, None]] = field(default_factory=dict)
    """The layouts in which terms of a value's gradient lie."""

    def run(self, splits: Sequence[Choices]) -> None:
        """Walk forward, and in training backward and through the update. Raises PlanError."""
        for position, (node, found) in enumerate(zip(self.outline.view.nodes, splits, strict=True)):
            self._forward(position, node, found)
        self._outputs()
        if self.training:
            self._seed()
            for position in reversed(range(len(self.strategies))):
                self._backward(position, self.outline.view.nodes[position])
            self._update()

    # --- forward ------------------------------------------------------------------------------

    def _forward(self, position: int, node: IRNode, splits: Choices) -> None:
        chosen = self._strategy(position, node, splits)
        self.strategies.append(chosen)
        for value_id, wanted in zip(node.inputs, chosen.reads, strict=True):
            if wanted is not None:
                self._fetch(position, value_id, wanted)
        for value_id, made in zip(node.outputs, chosen.makes, strict=True):
            self.held["value", value_id, 0] = [made]

    def _strategy(self, position: int, node: IRNode, splits: Choices) -> Strategy:
        """What is done with a node: terms are gone on with only where they lie."""
        settled = tuple(
            None
            if isinstance(split, Terms)
            and not all(self._in_terms(node.inputs[i], axis) for i in split.inputs)
            else split
            for axis, split in enumerate(splits)
        )
        whole_axes = self._whole_axes(node, settled) if self.training else NONE
        key = self.outline.kinds[position], settled, whole_axes
        if key not in self.known:
            bound, shapes = self.outline.bound(position), self._shapes(node)
            self.known[key] = strategy(bound, shapes, self.mesh.sizes, settled, whole_axes)
        found = self.known[key]
        if found is None:
            raise PlanError(
                f"{describe_node(node)} cannot be split as {settled} on the mesh {self.mesh}"
            )
        return found

    def _shapes(self, node: IRNode) -> CallShapes:
        values = self.outline.view.values
        return CallShapes(
            tuple(values[v].shape for v in node.inputs),
            tuple(values[v].shape for v in node.outputs),
        )

    def _in_terms(self, value_id: int, axis: int) -> bool:
        held = self.held.get(("value", value_id, 0), [])
        return bool(held) and all(placements[axis] == Partial() for placements in held)

    def _whole_axes(self, node: IRNode, splits: Choices) -> frozenset[int]:
        """Axes along which a node, and all before it that has a gradient, is done whole."""
        found = {axis for axis, split in enumerate(splits) if split is None}
        for value_id in node.inputs:
            if value_id in self.outline.required and value_id in self.outline.makers:
                found &= self.strategies[self.outline.makers[value_id]].whole
        return frozenset(found)

    def _outputs(self) -> None:
        """Results come out without terms; new contents where the old ones lie."""
        view = self.outline.view
        for value_id in dict.fromkeys(view.outputs):
            held = self.held.get(("value", value_id, 0), [])
            if held and all(self._has_terms(placements) for placements in held):
                phase: Phase = "forward"
                if self.training and self.microbatches > 1 and not view.values[value_id].shape:
                    phase = "once"
                whole_of = (Replicate(),) * self.mesh.ndim
                self._fetch(self.outline.makers[value_id], value_id, whole_of, phase)
        for old, new in view.updates.items():
            for wanted in list(self.held.get(("value", old, 0), ())):
                if new in self.outline.makers:
                    self._fetch(self.outline.makers[new], new, wanted)

    def _has_terms(self, placements: Placements) -> bool:
        return bool(Layout(placements).partial_axes(self.mesh))

    # --- backward -----------------------------------------------------------------------------

    def _seed(self) -> None:
        """Gradients begin at the loss."""
        for value_id in self.outline.losses:
            self.gradients[value_id] = {(Replicate(),) * self.mesh.ndim: None}

    def _backward(self, position: int, node: IRNode) -> None:
        chosen = self.strategies[position]
        reached = [i for i, v in enumerate(node.outputs) if v in self.gradients]
        if not reached:
            return
        kept = self._kept(node, chosen)
        for index in reached:
            self._total(position, node.outputs[index], mirrored(chosen.makes[index], kept))
        distinct: dict[tuple[int, Placements], int] = {}
        for index, (value_id, read) in enumerate(zip(node.inputs, chosen.reads, strict=True)):
            if value_id in self.outline.required and read is not None:
                distinct.setdefault((value_id, read), index)
        for (value_id, _), index in distinct.items():
            made = chosen.returns[index]
            assert made is not None
            terms = tuple(Partial() if axis in kept else p for axis, p in enumerate(made))
            shape = self.outline.view.values[value_id].shape
            self.gradients.setdefault(value_id, {})[normal(terms, self.mesh.sizes, shape)] = None

    def _kept(self, node: IRNode, chosen: Strategy) -> frozenset[int]:
        """The axes along which a node goes on with terms of its gradients."""
        groups = [g for v in node.outputs for g in self.gradients.get(v, ())]
        return frozenset(
            axis for axis in chosen.whole if all(group[axis] == Partial() for group in groups)
        )

    def _total(
        self, position: int, value_id: int, wanted: Placements, phase: Phase = "backward"
    ) -> None:
        """Bring the terms of a gradient to one layout."""
        for number, made in enumerate(self.gradients[value_id]):
            key: Key = ("gradient", value_id, number)
            self.held.setdefault(key, [made])
            self._bring(position, key, wanted, phase)

    # --- once a step --------------------------------------------------------------------------

    def _update(self) -> None:
        """Gradients of parameters are put together, and copies of parameters renewed."""
        for value_id in sorted(self.outline.trained & self.gradients.keys()):
            position, copies = self.first[value_id], self.held["value", value_id, 0]
            self._total(position, value_id, copies[0], "once")
            key: Key = ("new", value_id, 0)
            self.held[key] = [copies[0]]
            for wanted in copies[1:]:
                self._bring(position, key, wanted, "once")

    # --- conversions --------------------------------------------------------------------------

    def _fetch(
        self, position: int, value_id: int, wanted: Placements, phase: Phase = "forward"
    ) -> None:
        key: Key = ("value", value_id, 0)
        held = self.held.setdefault(key, [])
        if wanted in held:
            return
        value = self.outline.view.values[value_id]
        if value.producer is None:
            held.append(wanted)
            if value.is_stored:
                self.first.setdefault(value_id, position)
                self.loads.append(Loaded(position, value_id, self._nbytes(value, wanted)))
            return
        self._bring(position, key, wanted, phase)

    def _nbytes(self, value: IRValue, placements: Placements) -> int:
        key = value.shape, value.dtype, placements
        if key not in self.sizes:
            largest = largest_shape(placements, self.mesh.sizes, value.shape)
            self.sizes[key] = math.prod(largest) * itemsize(value.dtype)
        return self.sizes[key]

    def _bring(self, position: int, key: Key, wanted: Placements, phase: Phase) -> None:
        """Convert from the cheapest layout that is held, and keep every step."""
        held = self.held[key]
        if wanted in held:
            return
        value = self.outline.view.values[key[1]]
        ways = [self._steps(value, source, wanted) for source in held]
        _, cheapest = min((sum(step.seconds for step in way), i) for i, way in enumerate(ways))
        for step in ways[cheapest]:
            if step.after.placements not in held:
                held.append(step.after.placements)
                self.moves.append(Move(position, phase, key[1], step))

    def _steps(
        self, value: IRValue, source: Placements, wanted: Placements
    ) -> Sequence[RedistributionStep]:
        return convert(
            Layout(source),
            Layout(wanted),
            mesh=self.mesh,
            shape=value.shape,
            itemsize=itemsize(value.dtype),
            cluster=self.cluster,
        ).steps


def walk(
    outline: Outline,
    splits: Sequence[Choices],
    *,
    mesh: Mesh,
    cluster: Cluster,
    training: bool,
    microbatches: int = 1,
) -> SplitWalk:
    """Walk through a graph whose nodes are split so. Raises PlanError where that cannot be."""
    made = SplitWalk(outline, mesh, cluster, training, microbatches)
    made.run(splits)
    return made


def communications(moves: Iterable[Move]) -> Iterator[Move]:
    """The moves that are no slices, which each slot makes by itself."""
    return (move for move in moves if move.step.kind != "slice")
