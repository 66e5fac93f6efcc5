"""Nodes on slots: each is written on every slot of its mesh.

Whole where it is not split, else the part that its dimension annotation gives there. What a node
reads is fetched in the layout that it asks for, and what it makes is held in the layout that its
split gives. `NodeWriter.add` gives a `LocalNode`: what was written where, and how the node's
tensors lie along each axis of the mesh, which is what its gradients follow from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwright.building.holdings import Holdings, PlacedValue
from shardwright.building.slots import PhaseStage, SlotGraph
from shardwright.clusters import Mesh
from shardwright.errors import PlanError
from shardwright.ir import IRGraph, IRNode, IRValue
from shardwright.ir.repeats import fingerprint
from shardwright.ops.bound import BoundDimop, BoundPart
from shardwright.ops.catalog import dimop_of
from shardwright.ops.dimop import Cut
from shardwright.planning.plan import Assignment, Split, Terms
from shardwright.sharding import Layout, Partial
from shardwright.sharding.ranges import part
from shardwright.sharding.strategy import NodeAxis, wanted


@dataclass(frozen=True, slots=True)
class LocalNode:
    """A node as it stands on the slots of its mesh.

    inputs, outputs
        How its tensors are held; None for an input of which only the dtype is read.
    nodes
        What was written on each slot.
    axes
        How the tensors lie along each axis of the mesh.
    place
        Where the slots stood.
    """

    node: IRNode
    mesh: Mesh
    inputs: tuple[PlacedValue | None, ...]
    outputs: tuple[PlacedValue, ...]
    nodes: Mapping[str, Sequence[IRNode]]
    axes: Sequence[NodeAxis]
    place: PhaseStage


class SplitNode(NamedTuple):
    """A split node: the layouts that it reads and makes, and its part on each slot."""

    axes: tuple[NodeAxis, ...]
    inputs: tuple[Layout | None, ...]
    outputs: tuple[Layout, ...]
    terms: tuple[bool, ...]
    """Inputs that only the first of the slots adds, where they are added together."""
    parts: Mapping[str, BoundPart]
    first: frozenset[str]
    """The slots whose terms count."""


@dataclass(slots=True)
class NodeWriter:
    """Writes nodes on slots, in the place where the slots stand."""

    graph: IRGraph
    slots: Mapping[str, SlotGraph]
    holdings: Holdings
    known: dict[object, SplitNode] = field(default_factory=dict)

    def add(self, node: IRNode, assignment: Assignment) -> LocalNode:
        """Write a node on the slots of its mesh. Raises PlanError."""
        assignment = self._settled(node, assignment)
        if any(split is not None for split in assignment.splits):
            return self._add_parts(node, assignment)
        return self._add_copies(node, assignment.mesh)

    def _settled(self, node: IRNode, assignment: Assignment) -> Assignment:
        """The assignment without the axes along which there are no terms to go on with."""
        splits = tuple(
            None
            if isinstance(split, Terms)
            and not all(self._in_terms(node.inputs[i], assignment.mesh, axis) for i in split.inputs)
            else split
            for axis, split in enumerate(assignment.splits)
        )
        return Assignment(assignment.mesh, splits)

    def _in_terms(self, value_id: int, mesh: Mesh, axis: int) -> bool:
        """Whether a value lies on a mesh as terms of a sum, which nothing has reduced yet."""
        held = [h for h in self.holdings.held.get(value_id, ()) if h.mesh == mesh]
        return bool(held) and all(h.layout.placements[axis] == Partial() for h in held)

    def _add_copies(self, node: IRNode, mesh: Mesh) -> LocalNode:
        """The node as it is, on every slot of the mesh."""
        whole = Layout.replicated(mesh)
        sources = [self.holdings.fetch(value_id, mesh, whole) for value_id in node.inputs]
        made: list[dict[str, int]] = [{} for _ in node.outputs]
        starts = self._ends(mesh)
        for device in mesh.devices:
            builder = self.slots[device].builder
            values = [
                builder.value(value.name, value.shape, value.dtype, strides=value.strides)
                for value in self._outputs(node)
            ]
            inputs = [source.local[device] for source in sources]
            builder.emit(
                node.op,
                inputs,
                node.attrs,
                outputs=values,
                scopes=node.scopes,
                source=node.source,
            )
            for local, value in zip(made, values, strict=True):
                local[device] = value.id
        outputs = [
            self.holdings.add(value_id, PlacedValue(mesh, whole, local))
            for value_id, local in zip(node.outputs, made, strict=True)
        ]
        axes = [NodeAxis(None, None, "sum")] * mesh.ndim
        return self._written(node, mesh, sources, outputs, starts, axes)

    def _ends(self, mesh: Mesh) -> dict[str, int]:
        """How many nodes the slots have."""
        return {device: len(self.slots[device].builder.graph.nodes) for device in mesh.devices}

    def _written(
        self,
        node: IRNode,
        mesh: Mesh,
        inputs: Sequence[PlacedValue | None],
        outputs: Sequence[PlacedValue],
        starts: Mapping[str, int],
        axes: Sequence[NodeAxis],
    ) -> LocalNode:
        """What was written since the slots had as many nodes as ``starts`` says."""
        nodes = {
            device: tuple(self.slots[device].builder.graph.nodes[start:])
            for device, start in starts.items()
        }
        place = self.slots[mesh.devices[0]].place
        return LocalNode(node, mesh, tuple(inputs), tuple(outputs), nodes, axes, place)

    def _outputs(self, node: IRNode) -> list[IRValue]:
        return [self.graph.values[value_id] for value_id in node.outputs]

    # --- split nodes --------------------------------------------------------------------------

    def _add_parts(self, node: IRNode, assignment: Assignment) -> LocalNode:
        """The node's part on each slot of the mesh."""
        mesh, split = assignment.mesh, self._split(node, assignment)
        sources = [
            self.holdings.fetch(value_id, mesh, layout) if layout is not None else None
            for value_id, layout in zip(node.inputs, split.inputs, strict=True)
        ]
        made: list[dict[str, int]] = [{} for _ in node.outputs]
        starts = self._ends(mesh)
        operands = self.operands(node, split, sources)
        for device in mesh.devices:
            values = split.parts[device].emit(
                self.slots[device].builder,
                operands[device],
                scopes=node.scopes,
                source=node.source,
            )
            for local, value in zip(made, values, strict=True):
                local[device] = value.id
        outputs = []
        for value_id, layout, local in zip(node.outputs, split.outputs, made, strict=True):
            layout = layout.normal(mesh, self.graph.values[value_id].shape)
            outputs.append(self.holdings.add(value_id, PlacedValue(mesh, layout, local)))
        return self._written(node, mesh, sources, outputs, starts, split.axes)

    def operands(
        self, node: IRNode, split: SplitNode, sources: Sequence[PlacedValue | None]
    ) -> dict[str, list[IRValue | None]]:
        """What the part on each slot reads: a term to add is read by the first slots alone."""
        return {
            device: [
                None
                if source is None or (term and device not in split.first)
                else self.slots[device].value(source.local[device])
                for source, term in zip(sources, split.terms, strict=True)
            ]
            for device in split.parts
        }

    def _split(self, node: IRNode, assignment: Assignment) -> SplitNode:
        """Layouts and parts, worked out once for all nodes that do the same."""
        key = (fingerprint(self.graph, node), assignment)
        if key not in self.known:
            bound = dimop_of(self.graph, node)
            if bound is None:
                raise PlanError(f"{node.op} has no annotation, so the plan cannot split it")
            self.known[key] = _work_out(bound, assignment)
        return self.known[key]


def _work_out(bound: BoundDimop, assignment: Assignment) -> SplitNode:
    mesh, axes = assignment.mesh, [NodeAxis.of(bound, split) for split in assignment.splits]
    count = len(bound.call.inputs)
    coordinates = dict(zip(mesh.devices, mesh.coordinates(), strict=True))
    return SplitNode(
        axes=tuple(axes),
        inputs=tuple(wanted(axes, i) for i in range(count)),
        outputs=tuple(
            Layout(tuple(axis.output(i) for axis in axes)) for i in range(len(bound.call.outputs))
        ),
        terms=tuple(any(axis.adds(i) for axis in axes) for i in range(count)),
        parts={
            device: bound.part(_cuts(bound, assignment, coordinate))
            for device, coordinate in coordinates.items()
        },
        first=frozenset(
            device
            for device, coordinate in coordinates.items()
            if all(
                at == 0
                for at, axis in zip(coordinate, axes, strict=True)
                if any(axis.adds(i) for i in range(count))
            )
        ),
    )


def _cuts(bound: BoundDimop, assignment: Assignment, coordinate: tuple[int, ...]) -> dict[str, Cut]:
    """The range of each split identifier at a coordinate; outer axes cut first."""
    cuts: dict[str, Cut] = {}
    for split, size, index in zip(
        assignment.splits, assignment.mesh.sizes, coordinate, strict=True
    ):
        if not isinstance(split, Split):
            continue
        outer = cuts.get(split.identifier) or Cut(0, bound.length(split.identifier))
        start, end = part((outer.start, outer.end), size, index, split.unit)
        cuts[split.identifier] = Cut(start, end, outer.index * size + index, outer.num * size)
    return cuts
