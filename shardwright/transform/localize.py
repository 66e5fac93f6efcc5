"""From a graph and a plan to one graph a device slot.

Each node is written on every slot of its mesh: whole where it is not split, else the part that its
dimension annotation gives there. What a node reads is fetched in the layout that it asks for, and
what it makes is held in the layout that its split gives; `holdings` puts the communication between.
A plan of stages that split nothing is the special case in which every mesh is one slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwright.dimops.bound import BoundDimop, BoundPart, Carry, Flow
from shardwright.dimops.catalog import dimop_of
from shardwright.dimops.cuts import Cut
from shardwright.errors import PlanError
from shardwright.ir import IRGraph, IRNode, IRValue
from shardwright.ir.inference import Inference
from shardwright.ir.repeats import fingerprint, repeated_blocks
from shardwright.layout import Cluster, Layout, Mesh, Partial, Placement, Replicate, Shard
from shardwright.layout.ranges import part
from shardwright.planning.plan import Assignment, Plan, Split, Terms, assignments
from shardwright.transform.holdings import Holding, Holdings
from shardwright.transform.slots import BORDER, Localized, Part, SlotGraph


def localize(graph: IRGraph, plan: Plan) -> Localized:
    """The slots of a planned graph. Raises PlanError where the plan cannot be carried out."""
    inference = Inference()
    slots = {device: SlotGraph.empty(device, inference) for device in plan.devices}
    holdings = Holdings(graph, slots, Cluster((tuple(plan.devices),)))
    localizer = _Localizer(graph, slots, holdings)
    borders = {cut for repeat in repeated_blocks(graph) for cut in repeat.cuts}
    ends = _Ends(graph, holdings)
    assigned = list(assignments(plan, len(graph.nodes)))
    arrivals = _arrivals(graph, assigned)
    for position, assignment in enumerate(assigned):
        if position in borders:
            for device in assignment.mesh.devices:
                slots[device].add(BORDER)
        for value_id in arrivals.get(position, ()):
            whole = Layout.replicated(assignment.mesh)
            holdings.fetch(value_id, assignment.mesh, whole)
        localizer.add(graph.nodes[position], assignment)
    outputs = ends.outputs()
    updates = ends.updates()
    for slot in slots.values():
        slot.note()
    return Localized(slots, holdings.communications, ends.inputs(), outputs, updates)


def _arrivals(graph: IRGraph, assigned: Sequence[Assignment]) -> dict[int, list[int]]:
    """What nodes read whole from other meshes, by the position at which their own stage begins.

    Brought there at once, it does not cut the stage in pieces where it is first read.
    """
    made: dict[int, int] = {}
    arrivals: dict[int, dict[int, None]] = {}
    start = 0
    for position, (node, assignment) in enumerate(zip(graph.nodes, assigned, strict=True)):
        if position and assignment.mesh != assigned[position - 1].mesh:
            start = position
        if not any(assignment.splits):
            arriving = (v for v in node.inputs if made.get(v, start) < start)
            arrivals.setdefault(start, {}).update(dict.fromkeys(arriving))
        made |= dict.fromkeys(node.outputs, position)
    return {position: list(values) for position, values in arrivals.items()}


class _Parts(NamedTuple):
    """A split node: the layouts that it reads and makes, and its part on each slot."""

    inputs: tuple[Layout | None, ...]
    outputs: tuple[Layout, ...]
    terms: tuple[bool, ...]
    """Inputs that only the first of the slots adds, where they are added together."""
    parts: Mapping[str, BoundPart]
    first: frozenset[str]
    """The slots whose terms count."""


@dataclass(slots=True)
class _Localizer:
    graph: IRGraph
    slots: Mapping[str, SlotGraph]
    holdings: Holdings
    known: dict[object, _Parts] = field(default_factory=dict)

    def add(self, node: IRNode, assignment: Assignment) -> None:
        """Write a node on the slots of its mesh."""
        assignment = self._settled(node, assignment)
        if any(split is not None for split in assignment.splits):
            self._add_parts(node, assignment)
        else:
            self._add_copies(node, assignment.mesh)

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

    def _add_copies(self, node: IRNode, mesh: Mesh) -> None:
        """The node as it is, on every slot of the mesh."""
        whole = Layout.replicated(mesh)
        sources = [self.holdings.fetch(value_id, mesh, whole) for value_id in node.inputs]
        made: list[dict[str, int]] = [{} for _ in node.outputs]
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
        for value_id, local in zip(node.outputs, made, strict=True):
            self.holdings.add(value_id, Holding(mesh, whole, local))

    def _outputs(self, node: IRNode) -> list[IRValue]:
        return [self.graph.values[value_id] for value_id in node.outputs]

    # --- split nodes --------------------------------------------------------------------------

    def _add_parts(self, node: IRNode, assignment: Assignment) -> None:
        """The node's part on each slot of the mesh."""
        mesh, split = assignment.mesh, self._split(node, assignment)
        sources = [
            self.holdings.fetch(value_id, mesh, layout) if layout is not None else None
            for value_id, layout in zip(node.inputs, split.inputs, strict=True)
        ]
        made: list[dict[str, int]] = [{} for _ in node.outputs]
        for device in mesh.devices:
            slot = self.slots[device]
            inputs = [
                None
                if source is None or (term and device not in split.first)
                else slot.value(source.local[device])
                for source, term in zip(sources, split.terms, strict=True)
            ]
            values = split.parts[device].emit(
                slot.builder, inputs, scopes=node.scopes, source=node.source
            )
            for local, value in zip(made, values, strict=True):
                local[device] = value.id
        for value_id, layout, local in zip(node.outputs, split.outputs, made, strict=True):
            shape = self.graph.values[value_id].shape
            self.holdings.add(value_id, Holding(mesh, layout.normal(mesh, shape), local))

    def _split(self, node: IRNode, assignment: Assignment) -> _Parts:
        """Layouts and parts, worked out once for all nodes that do the same."""
        key = (fingerprint(self.graph, node), assignment)
        if key not in self.known:
            bound = dimop_of(self.graph, node)
            if bound is None:
                raise PlanError(f"{node.op} has no annotation, so the plan cannot split it")
            self.known[key] = _work_out(bound, assignment)
        return self.known[key]


def _work_out(bound: BoundDimop, assignment: Assignment) -> _Parts:
    mesh, axes = assignment.mesh, [_Axis.of(bound, split) for split in assignment.splits]
    count = len(bound.call.inputs)
    coordinates = dict(zip(mesh.devices, mesh.coordinates(), strict=True))
    return _Parts(
        inputs=tuple(_wanted(axes, i) for i in range(count)),
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


@dataclass(frozen=True, slots=True)
class _Axis:
    """How a node's tensors lie along one axis of its mesh."""

    split: Split | Terms | None
    flow: Flow | None
    reduction: str

    @classmethod
    def of(cls, bound: BoundDimop, split: Split | Terms | None) -> _Axis:
        flow = bound.flow(split.identifier) if isinstance(split, Split) else None
        return cls(split, flow, bound.reduction)

    def adds(self, index: int) -> bool:
        """Whether an input is a term that is added to what the parts make: by the first only."""
        return self.flow is not None and self.flow.inputs[index].kind == "partial"

    def ignores(self, index: int) -> bool:
        """Whether only the dtype of an input is read."""
        return self.flow is not None and self.flow.inputs[index].kind == "any"

    def input(self, index: int) -> Placement:
        """How an input is read: a term to add comes whole."""
        if isinstance(self.split, Terms):
            return Partial() if index in self.split.inputs else Replicate()
        if self.flow is None or self.adds(index):
            return Replicate()
        return self._placement(self.flow.inputs[index])

    def output(self, index: int) -> Placement:
        """How an output is made."""
        if isinstance(self.split, Terms):
            return Partial()
        return Replicate() if self.flow is None else self._placement(self.flow.outputs[index])

    def _placement(self, carry: Carry) -> Placement:
        if carry.kind in ("whole", "any"):
            return Replicate()
        if carry.kind == "partial":
            return Partial(self.reduction)
        assert carry.dim is not None
        assert isinstance(self.split, Split)
        return Shard(carry.dim, carry.unit * self.split.unit)


def _wanted(axes: Sequence[_Axis], index: int) -> Layout | None:
    """The layout to fetch an input in, None where only the dtype is read."""
    if any(axis.ignores(index) for axis in axes):
        return None
    return Layout(tuple(axis.input(index) for axis in axes))


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


# --- ends ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Ends:
    """Inputs, outputs and updates of a graph whose nodes are all written."""

    graph: IRGraph
    holdings: Holdings

    def inputs(self) -> dict[int, list[Part]]:
        """The slices of inputs that slots take."""
        found: dict[int, list[Part]] = {value_id: [] for value_id in self.graph.inputs}
        for (value_id, device, ranges), local in self.holdings.loaded.items():
            if value_id in found:
                found[value_id].append(Part(device, local, ranges))
        return found

    def outputs(self) -> list[list[Part]]:
        """Slices that cover each output, each slice from the first slot that holds it."""
        return [self._distinct(value_id) for value_id in self.graph.outputs]

    def _distinct(self, value_id: int) -> list[Part]:
        value = self.graph.values[value_id]
        held = self.holdings.held.get(value_id, [])
        ready = next((h for h in held if not h.layout.partial_axes(h.mesh)), None)
        if ready is None:
            mesh = held[0].mesh if held else _one_slot(next(iter(self.holdings.slots)))
            ready = self.holdings.fetch(value_id, mesh, Layout.replicated(mesh))
        found: dict[object, Part] = {}
        for slice_ in self.holdings.parts(value, ready):
            found.setdefault(slice_.ranges, slice_)
        return list(found.values())

    def updates(self) -> list[tuple[Part, Part]]:
        """For each slice of a stored value that a slot holds, the slice that replaces it."""
        found: list[tuple[Part, Part]] = []
        for old, new in self.graph.updates.items():
            value = self.graph.values[old]
            for holding in list(self.holdings.held.get(old, ())):
                made = self.holdings.fetch(new, holding.mesh, holding.layout)
                found += zip(
                    self.holdings.parts(value, holding),
                    self.holdings.parts(self.graph.values[new], made),
                    strict=True,
                )
        return list(dict.fromkeys(found))


def _one_slot(device: str) -> Mesh:
    return Mesh((), (), (device,))
