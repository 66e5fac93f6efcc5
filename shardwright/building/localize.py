"""From a graph and a plan to one graph a device slot.

The nodes are written one after another on the slots of their meshes: whole where a node is not
split, else the part that its dimension annotation gives there. What a node reads is fetched in the
layout that it asks for (`holdings`), and what it makes is held in the layout that its split gives.
A plan of stages that split nothing is the special case in which every mesh is one slot. `update`
does the same for a training step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwright.building.holdings import Holdings, PlacedValue
from shardwright.building.slots import BORDER, Localized, LocalSlice, PhaseStage, SlotGraph
from shardwright.clusters import Mesh
from shardwright.errors import PlanError
from shardwright.ir import IRGraph, IRNode, IRValue
from shardwright.ir.execute import describe_node
from shardwright.ir.inference import Inference
from shardwright.ir.repeats import fingerprint, repeated_blocks
from shardwright.ir.tensor_meta import torch_dtype
from shardwright.ops.bound import BoundDimop, BoundPart
from shardwright.ops.catalog import dimop_of
from shardwright.ops.dimop import Cut
from shardwright.planning.plan import Assignment, Plan, Split, Terms, assignments, cluster_of
from shardwright.sharding import Layout, Partial
from shardwright.sharding.ranges import part, whole
from shardwright.sharding.strategy import NodeAxis, wanted


def localize(graph: IRGraph, plan: Plan) -> Localized:
    """The slots of a planned graph. Raises PlanError where the plan cannot be carried out."""
    holdings = empty_holdings(graph, plan)
    places = [PhaseStage()] * len(graph.nodes)
    write_forward(graph, plan, holdings, places)
    return finish(holdings, Ends(graph, holdings))


def empty_holdings(graph: IRGraph, plan: Plan) -> Holdings:
    """Slots that do nothing yet, and hold nothing."""
    inference = Inference()
    slots = {device: SlotGraph.empty(device, inference) for device in plan.devices}
    return Holdings(graph, slots, cluster_of(plan))


def write_forward(
    graph: IRGraph, plan: Plan, holdings: Holdings, places: Sequence[PhaseStage]
) -> dict[int, LocalNode]:
    """Write the nodes that the plan assigns, in their places, stage after stage.

    They are given by position, in the order in which they were written. Raises PlanError where a
    node reads what a later stage makes.
    """
    borders = layer_borders(graph)
    assigned = list(assignments(plan, len(places)))
    order = _stage_after_stage(graph, plan, places)
    arrivals = _arrivals(graph, assigned, order)
    writer = NodeWriter(graph, holdings.slots, holdings)
    written = {}
    for position in order:
        mesh = assigned[position].mesh
        for device in mesh.devices:
            holdings.slots[device].go(places[position])
            if position in borders:
                holdings.slots[device].add(BORDER)
        for value_id in arrivals.get(position, ()):
            holdings.fetch(value_id, mesh, Layout.replicated(mesh))
        written[position] = writer.add(graph.nodes[position], assigned[position])
    return written


def _stage_after_stage(graph: IRGraph, plan: Plan, places: Sequence[PhaseStage]) -> list[int]:
    """Positions of nodes by stage, those of one stage as they stand; what is prepared is first."""
    found = [-1 if place.stage is None else place.stage for place in places]
    stages = plan.stages or found
    made: dict[int, int] = {}
    for node, stage in zip(graph.nodes, stages, strict=False):
        if late := [value_id for value_id in node.inputs if made.get(value_id, stage) > stage]:
            raise PlanError(
                f"{describe_node(node)} is in stage {stage} of the plan and reads "
                f"{graph.values[late[0]].name!r} of stage {made[late[0]]}; number the stages so "
                "that nothing reads what a later one makes"
            )
        made |= dict.fromkeys(node.outputs, stage)
    return sorted(range(len(stages)), key=stages.__getitem__)


def finish(holdings: Holdings, ends: Ends) -> Localized:
    """What the slots do, complete."""
    outputs = ends.outputs()
    updates = ends.updates()
    for slot in holdings.slots.values():
        slot.note()
    return Localized(holdings.slots, holdings.communications, ends.inputs(), outputs, updates)


def layer_borders(graph: IRGraph) -> set[int]:
    """The positions at which one repeated layer meets the next."""
    return {cut for repeat in repeated_blocks(graph) for cut in repeat.cuts}


def _arrivals(
    graph: IRGraph, assigned: Sequence[Assignment], order: Sequence[int]
) -> dict[int, list[int]]:
    """What nodes read whole from other meshes, by the position at which their own stage begins.

    Brought there at once, it does not cut the stage in pieces where it is first read.
    """
    made: dict[int, int] = {}
    arrivals: dict[int, dict[int, None]] = {}
    start = 0
    for at, position in enumerate(order):
        node, assignment = graph.nodes[position], assigned[position]
        if at and assignment.mesh != assigned[order[at - 1]].mesh:
            start = at
        if not any(assignment.splits):
            arriving = (v for v in node.inputs if made.get(v, start) < start)
            arrivals.setdefault(order[start], {}).update(dict.fromkeys(arriving))
        made |= dict.fromkeys(node.outputs, at)
    return {position: list(values) for position, values in arrivals.items()}


# --- nodes --------------------------------------------------------------------------------------


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
    """How a node is split: the layouts that it reads and makes, and its part on each slot.

    Slots do all of a node that is not split; it has no parts.
    """

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
        mesh, split = assignment.mesh, self._split(node, assignment)
        sources = [
            self.holdings.fetch(value_id, mesh, layout) if layout is not None else None
            for value_id, layout in zip(node.inputs, split.inputs, strict=True)
        ]
        graphs = {device: self.slots[device].builder.graph for device in mesh.devices}
        starts = {device: len(graph.nodes) for device, graph in graphs.items()}
        operands = self.operands(node, mesh, split, sources)
        made: list[dict[str, int]] = [{} for _ in node.outputs]
        for device in mesh.devices:
            values = self._emit(node, split.parts.get(device), device, operands[device])
            for local, value in zip(made, values, strict=True):
                local[device] = value.id
        outputs = []
        for value_id, layout, local in zip(node.outputs, split.outputs, made, strict=True):
            layout = layout.normal(mesh, self.graph.values[value_id].shape)
            outputs.append(self.holdings.add(value_id, PlacedValue(mesh, layout, local)))
        written = {device: tuple(graph.nodes[starts[device] :]) for device, graph in graphs.items()}
        place = self.slots[mesh.devices[0]].place
        return LocalNode(node, mesh, tuple(sources), tuple(outputs), written, split.axes, place)

    def _emit(
        self,
        node: IRNode,
        part: BoundPart | None,
        device: str,
        operands: Sequence[IRValue | None],
    ) -> list[IRValue]:
        """What a slot makes, of its part of the node or of all of it."""
        builder = self.slots[device].builder
        if part is not None:
            return part.emit(builder, operands, scopes=node.scopes, source=node.source)
        results = (None if v is None else self.graph.values[v] for v in node.results)
        values = [
            value and builder.value(value.name, value.shape, value.dtype, strides=value.strides)
            for value in results
        ]
        inputs = [operand for operand in operands if operand is not None]
        builder.emit(
            node.op, inputs, node.attrs, outputs=values, scopes=node.scopes, source=node.source
        )
        return [value for value in values if value is not None]

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

    def operands(
        self, node: IRNode, mesh: Mesh, split: SplitNode, sources: Sequence[PlacedValue | None]
    ) -> dict[str, list[IRValue | None]]:
        """What each slot reads: a term to add is read by the first slots alone."""
        return {
            device: [
                None
                if source is None or (term and device not in split.first)
                else self.slots[device].value(source.local[device])
                for source, term in zip(sources, split.terms, strict=True)
            ]
            for device in mesh.devices
        }

    def _split(self, node: IRNode, assignment: Assignment) -> SplitNode:
        """Layouts and parts, worked out once for all nodes that do the same."""
        if not any(assignment.splits):
            return _whole_node(node, assignment.mesh)
        key = (fingerprint(self.graph, node), assignment)
        if key not in self.known:
            bound = dimop_of(self.graph, node)
            if bound is None:
                raise PlanError(f"{node.op} has no annotation, so the plan cannot split it")
            self.known[key] = _work_out(bound, assignment)
        return self.known[key]


def _whole_node(node: IRNode, mesh: Mesh) -> SplitNode:
    """All of the node on every slot."""
    layout = Layout.replicated(mesh)
    return SplitNode(
        axes=(NodeAxis(None, None, "sum"),) * mesh.ndim,
        inputs=(layout,) * len(node.inputs),
        outputs=(layout,) * len(node.outputs),
        terms=(False,) * len(node.inputs),
        parts={},
        first=frozenset(),
    )


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


# --- inputs, outputs, new contents --------------------------------------------------------------


@dataclass(slots=True)
class Ends:
    """What comes in and goes out of the slots, once all nodes are written.

    In a training step a number that the forward gives, such as the loss, is added up over the
    microbatches: where it is a floating-point number, it comes out as their mean.
    """

    graph: IRGraph
    holdings: Holdings
    microbatches: int = 1
    made: dict[int, list[LocalSlice]] = field(default_factory=dict)
    """Slices that cover the outputs that are there already."""
    sums: list[tuple[LocalSlice, LocalSlice]] = field(default_factory=list)

    def results(self) -> None:
        """Bring out what the forward of a training step gives, before anything else is written."""
        for value_id in self.graph.outputs:
            if value_id in self.holdings.held and value_id not in self.made:
                self.made[value_id] = self._result(self.graph.values[value_id])

    def inputs(self) -> dict[int, list[LocalSlice]]:
        """The slices of inputs that slots take."""
        found: dict[int, list[LocalSlice]] = {}
        for (value_id, device, ranges), local in self.holdings.loaded.items():
            if self.graph.values[value_id].role == "input":
                found.setdefault(value_id, []).append(LocalSlice(device, local, ranges))
        return found

    def outputs(self) -> list[list[LocalSlice]]:
        """Slices that cover each output, each slice from the first slot that holds it."""
        return [self.made.get(v) or self._distinct(v) for v in self.graph.outputs]

    def updates(self) -> list[tuple[LocalSlice, LocalSlice]]:
        """For each slice of a stored value that a slot holds, the slice that replaces it."""
        found = list(self.sums)
        for old, new in self.graph.updates.items():
            loaded = self._loaded(old)
            if not loaded and self.graph.values[old].role == "buffer":
                found += self._written_only(old, new)
            for holding in loaded:
                made = self._renewed(new, holding)
                found += zip(
                    self.holdings.parts(self.graph.values[old], holding),
                    self.holdings.parts(self.graph.values[new], made),
                    strict=True,
                )
        return list(dict.fromkeys(found))

    def _loaded(self, value_id: int) -> list[PlacedValue]:
        """Where the slots have a stored value in store, not made from what they have."""
        slots = self.holdings.slots
        return [
            holding
            for holding in self.holdings.held.get(value_id, ())
            if all(slots[device].value(v).is_stored for device, v in holding.local.items())
        ]

    def _written_only(self, old: int, new: int) -> Iterator[tuple[LocalSlice, LocalSlice]]:
        """A buffer that nothing reads: it lies where its new contents are made, copied into it."""
        holdings = self.holdings
        held = holdings.held.get(new)
        mesh = held[0].mesh if held else _one_slot(next(iter(holdings.slots)))
        place = held[0].place if held else holdings.slots[mesh.devices[0]].place
        whole_layout = Layout.replicated(mesh)
        with holdings.at(place, mesh.devices):
            before = holdings.fetch(old, mesh, whole_layout)
            made = holdings.fetch(new, mesh, whole_layout)
            local: dict[str, int] = {}
            for device in mesh.devices:
                slot = holdings.slots[device]
                pair = (slot.value(holding.local[device]) for holding in (before, made))
                local[device] = slot.builder.call("aten.copy.default", *pair).id
            copied = holdings.derive(self.graph.values[new])
            after = holdings.add(copied.id, PlacedValue(mesh, whole_layout, local))
        return zip(
            holdings.parts(self.graph.values[old], before),
            holdings.parts(copied, after),
            strict=True,
        )

    def _renewed(self, new: int, old: PlacedValue) -> PlacedValue:
        """New contents where the old ones lie; brought there when they are made."""
        held = self.holdings.held.get(new)
        updated = held is not None and held[0].place.phase == "update"
        with self.holdings.at(PhaseStage("update") if updated else old.place, old.mesh.devices):
            return self.holdings.fetch(new, old.mesh, old.layout)

    def _result(self, value: IRValue) -> list[LocalSlice]:
        holding = self.holdings.held[value.id][0]
        with self.holdings.at(holding.place, holding.mesh.devices):
            if self.microbatches > 1 and not value.shape and value.producer is not None:
                return self._summed(value, holding)
            return self._distinct(value.id)

    def _summed(self, value: IRValue, holding: PlacedValue) -> list[LocalSlice]:
        """A number as the sum over all microbatches, the mean where it is of floating point.

        Terms of a sum over slots are put together when they are complete, once a step.
        """
        local = {
            device: self._accumulated(device, value, holding.local[device])
            for device in holding.mesh.devices
        }
        total = self.holdings.derive(value)
        with self.holdings.at(PhaseStage("update"), holding.mesh.devices):
            self.holdings.add(total.id, PlacedValue(holding.mesh, holding.layout, local))
            return self._distinct(total.id)

    def _accumulated(self, device: str, value: IRValue, local: int) -> int:
        slot = self.holdings.slots[device]
        builder, term = slot.builder, slot.value(local)
        if torch_dtype(value.dtype).is_floating_point:
            term = builder.call("aten.div.Scalar", term, self.microbatches)
        before = slot.zeros(f"sum.{value.name}", (), value.dtype)
        after: IRValue = builder.call("aten.add.Tensor", before, term)
        ends = (LocalSlice(device, before.id, whole(())), LocalSlice(device, after.id, whole(())))
        self.sums.append(ends)
        return after.id

    def _distinct(self, value_id: int) -> list[LocalSlice]:
        value = self.holdings.values[value_id]
        held = self.holdings.held.get(value_id, [])
        ready = next((h for h in held if not h.layout.partial_axes(h.mesh)), None)
        if ready is None:
            mesh = held[0].mesh if held else _one_slot(next(iter(self.holdings.slots)))
            ready = self.holdings.fetch(value_id, mesh, Layout.replicated(mesh))
        found: dict[object, LocalSlice] = {}
        for slice_ in self.holdings.parts(value, ready):
            found.setdefault(slice_.ranges, slice_)
        return list(found.values())


def _one_slot(device: str) -> Mesh:
    return Mesh((), (), (device,))
