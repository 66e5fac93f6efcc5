"""Collectives as nodes of a stage's graph, which keep autograd's gradients right.

A collective is a marker (`shardwright.ir.operators.is_marker`): one input, one output, and as
attributes the mesh axis that it goes along and what the function of that name in
`shardwright.codegenerate.support.exchanges` takes behind it. The collectives of a partition's slots
are the same, in one order; what differs between slots is found at run time from ``self.slots``. A
collective of which only one slot would need the result is done by all, or by none.

Nodes are written as `shardwright.building.localize` writes them, where communications are between
tasks; here they are nodes of the slots' graphs, and autograd goes through them. Gradients along
each axis:

    value       its gradient
    Shard       Shard, each slot has the gradient of its part
    Replicate   Replicate, all of it on every slot
    Partial     Replicate, since the gradient of a sum is that of each term

Each collective keeps that, by its counterpart, and there is one wherever a slot's own backward
would make less:

    a whole that parts read       each slot makes the part that goes through its own work:
                                  `all_reduce_gradient` adds them up, once a value for all parts
    a term that the first adds    all slots read it, the others as zeros: `masked_partial`; so all
                                  have its gradient, which is the sum's, and nothing is sent
    what all parts make alike     one slot continues with its gradient: `masked_gradient`
    a maximum of parts' maxima    made of the whole by every slot: equal elements share its gradient
                                  evenly, wherever they are

From one partition to another a value goes by a port: in the layout in which it is held, where both
meshes are alike, so that slot gives to slot; whole from every slot to every slot, where they are
not. Partial sums are added up first. Inputs are whole, but for the batch along an axis ``data``, of
which a slot takes its part. A parameter is loaded once a partition, in the layout that is asked for
first; other layouts are made of that, so that it has one gradient. Partitions that are tied by one
load it in one layout, where their meshes are alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardwright.building.holdings import Holdings, PlacedValue
from shardwright.building.localize import LocalNode, NodeWriter, SplitNode
from shardwright.building.slots import SlotGraph
from shardwright.clusters import Mesh
from shardwright.codegenerate.spelling.forms import listed, literal
from shardwright.errors import CodegenError
from shardwright.ir import IRNode, IRValue, Scope
from shardwright.ir.tensor_meta import torch_dtype
from shardwright.ops.catalog import dimop_of
from shardwright.planning.plan import Assignment
from shardwright.planning.rules import DATA
from shardwright.sharding import Layout, Partial, Placement, RedistributionStep, Replicate, Shard
from shardwright.sharding.ranges import Ranges, shape_of, whole
from shardwright.sharding.strategy import NodeAxis

SLOTS = "slots"
"""The attribute of a generated class that knows where in the mesh it is."""

COLLECTIVES: Mapping[str, tuple[str, ...]] = {
    "all_reduce": (),
    "all_reduce_extreme": ("op",),
    "all_gather": ("dim", "sizes"),
    "all_gather_for_parts": ("dim", "sizes"),
    "reduce_scatter": ("dim", "sizes"),
    "own_slice": ("dim", "sizes"),
    "all_to_all": ("split_dim", "split_sizes", "join_dim", "join_sizes"),
    "all_reduce_gradient": (),
    "masked_partial": (),
    "masked_gradient": (),
}
"""The attributes of each collective beside ``axis``, in the order of its arguments."""

ALONE = frozenset({"masked_partial", "masked_gradient"})
"""Those in which nothing is communicated, forward or backward."""


def is_collective(node: IRNode) -> bool:
    """Whether a node of a stage is a collective."""
    return node.op in COLLECTIVES


def spell_collective(node: IRNode, operands: Mapping[int, str]) -> str:
    """The call of a collective; ``operands`` are expressions by value id.

    Raises CodegenError where the node is none.
    """
    if not is_collective(node):
        raise CodegenError(f"{node.op} is no collective; there are {', '.join(COLLECTIVES)}")
    arguments = [str(operands[node.inputs[0]]), f"self.{SLOTS}[{_text(node.attrs['axis'])}]"]
    arguments += [f"{name}={_text(node.attrs[name])}" for name in COLLECTIVES[node.op]]
    return f"{node.op}({', '.join(arguments)})"


def _text(value: Any) -> str:
    """A literal; lists are written as tuples."""
    if isinstance(value, list):
        return listed([_text(item) for item in value])
    return literal(value)


class Collective(NamedTuple):
    """A collective: its name, its attributes beside the axis, and what each member then holds."""

    op: str
    attrs: dict[str, Any]
    slices: Sequence[Ranges]


def collectives(
    step: RedistributionStep, before: Sequence[Ranges], after: Sequence[Ranges]
) -> list[Collective]:
    """The collectives of a step. Raises CodegenError for a reduction that none of them does."""
    source, target = step.source, step.target
    if isinstance(source, Shard) and isinstance(target, Shard):
        sizes: dict[str, Any] = {
            "split_dim": target.dim,
            "split_sizes": _sizes(after, target.dim),
            "join_dim": source.dim,
            "join_sizes": _sizes(before, source.dim),
        }
        return [Collective("all_to_all", sizes, after)]
    if isinstance(source, Shard):
        return [Collective("all_gather", _along(source.dim, before), after)]
    is_sum = isinstance(source, Partial) and source.op == "sum"
    if not isinstance(target, Shard):
        return [Collective("all_reduce", {}, after) if is_sum else _extreme(source, after)]
    if is_sum:
        return [Collective("reduce_scatter", _along(target.dim, after), after)]
    own = Collective("own_slice", _along(target.dim, after), after)
    return [own] if isinstance(source, Replicate) else [_extreme(source, before), own]


def _extreme(source: Placement, slices: Sequence[Ranges]) -> Collective:
    """What reduces terms of a maximum or a minimum."""
    op = source.op if isinstance(source, Partial) else ""
    if op not in ("max", "min"):
        raise CodegenError(
            f"slots hold {source}, of which no code is written; let the plan keep the node whole"
        )
    return Collective("all_reduce_extreme", {"op": op}, slices)


def _along(dim: int, slices: Sequence[Ranges]) -> dict[str, Any]:
    return {"dim": dim, "sizes": _sizes(slices, dim)}


def _sizes(slices: Sequence[Ranges], dim: int) -> list[int]:
    return [ranges[dim][1] - ranges[dim][0] for ranges in slices]


# --- where gradients need collectives -------------------------------------------------------------


Exchange = Mapping[str, int]
"""The nodes of one collective: its node on each slot."""


@dataclass
class StageHoldings(Holdings):
    """Holdings whose collectives are nodes of the slots' graphs.

    exchanges
        The collectives in their order.
    leaving
        What leaves a partition for another or as an output, by value.
    differentiable
        Values of the graph through which gradients go.
    """

    exchanges: list[Exchange] = field(default_factory=list)
    leaving: dict[int, PlacedValue] = field(default_factory=dict)
    differentiable: set[int] = field(init=False)
    _copies: dict[tuple[object, ...], PlacedValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.differentiable = _differentiable(self)
        self._nodes = self.graph.node_by_id()

    # --- collectives --------------------------------------------------------------------------

    def exchange(
        self,
        op: str,
        value: IRValue,
        local: Mapping[str, int],
        shapes: Mapping[str, Sequence[int]],
        /,
        **attrs: Any,
    ) -> dict[str, int]:
        """One collective among slots that have these values; what each gets."""
        scopes, made, nodes = self._scopes(value), {}, {}
        for device, given in local.items():
            builder = self.slots[device].builder
            result = builder.value(value.name, shapes[device], value.dtype)
            builder.emit(op, [given], attrs, outputs=[result], scopes=scopes)
            made[device], nodes[device] = result.id, builder.graph.nodes[-1].id
        self.exchanges.append(nodes)
        return made

    def along(self, op: str, value: IRValue, holding: PlacedValue, axis: int) -> PlacedValue:
        """A holding through a collective that changes no shape, along an axis of its mesh."""
        local: dict[str, int] = {}
        for group in holding.mesh.groups(axis):
            given = {device: holding.local[device] for device in group}
            shapes = {device: self._value(device, given[device]).shape for device in group}
            local |= self.exchange(op, value, given, shapes, axis=holding.mesh.axes[axis])
        return PlacedValue(holding.mesh, holding.layout, local, holding.place)

    def for_parts(self, value: IRValue, holding: PlacedValue, axes: Sequence[int]) -> PlacedValue:
        """A holding for readers that each do a part of the work along some axes, made once."""
        for axis in axes:
            key = (holding.mesh.devices, axis, *holding.local.values())
            if key not in self._copies:
                self._copies[key] = self.along("all_reduce_gradient", value, holding, axis)
            holding = self._copies[key]
        return holding

    def _step(
        self,
        value: IRValue,
        holding: PlacedValue,
        step: RedistributionStep,
        before: Mapping[str, Ranges],
        after: Mapping[str, Ranges],
    ) -> dict[str, int]:
        axis, local = holding.mesh.axes[step.axis], {d: holding.local[d] for d in before}
        for op, attrs, slices in collectives(step, [*before.values()], [*after.values()]):
            shapes = dict(zip(local, map(shape_of, slices), strict=True))
            local = self.exchange(op, value, local, shapes, axis=axis, **attrs)
        return local

    def _value(self, device: str, local: int) -> IRValue:
        return self.slots[device].value(local)

    def _scopes(self, value: IRValue) -> tuple[Scope, ...]:
        """The modules around what makes a value and all that read it."""
        users = [self._nodes[node_id].scopes for node_id in value.users]
        if value.producer is not None:
            users.append(self._nodes[value.producer].scopes)
        if not users or value.id in self.graph.outputs:
            return ()
        common = min(users, key=len)
        while any(scopes[: len(common)] != common for scopes in users):
            common = common[:-1]
        return common

    # --- what comes from elsewhere --------------------------------------------------------------

    def _load(self, value: IRValue, mesh: Mesh, layout: Layout) -> PlacedValue:
        known = self.held.get(value.id)
        if known and value.id in self.graph.updates and known[0].mesh != mesh:
            return self._bring(value, known[0], mesh, layout)  # one partition changes it
        if value.role not in ("input", "param"):
            return super()._load(value, mesh, layout)
        held = [holding for holding in self.held.get(value.id, ()) if holding.mesh == mesh]
        if not held:
            first = self._loaded_as(value, mesh, layout).normal(mesh, value.shape)
            held = [super()._load(value, mesh, first)]
        if held[0].layout == layout:
            return held[0]
        return self._bring(value, held[0], mesh, layout)

    def _loaded_as(self, value: IRValue, mesh: Mesh, layout: Layout) -> Layout:
        """The layout in which a partition that wants it in another loads an input or parameter."""
        if value.role == "input":
            return end_layout(layout, mesh)
        elsewhere = (h.layout for h in self.held.get(value.id, ()) if h.mesh.sizes == mesh.sizes)
        return next(elsewhere, layout)

    def _new_slice(self, value: IRValue, slot: SlotGraph, ranges: Ranges) -> IRValue:
        """A slice with its contents; without placements where it is all of what is stored."""
        made = super()._new_slice(value, slot, ranges)
        made.persistent = value.persistent
        all_of_it = ranges == whole(value.shape)
        if value.placements is None and all_of_it:
            made.placements = None
        tensor = self.graph.tensors.get(value.id)
        if made.is_stored and tensor is not None:
            taken = tuple(slice(start, end) for start, end in ranges)
            slot.builder.graph.tensors[made.id] = tensor if all_of_it else tensor[taken]
        return made

    def _bring(
        self, value: IRValue, source: PlacedValue, mesh: Mesh, layout: Layout
    ) -> PlacedValue:
        if source.mesh != mesh:
            source = self._enter(value, self.leave(value, source, mesh, layout), mesh)
        conversion = self._conversion(value, source.layout, layout, mesh)
        return self._convert(value, source, conversion)

    def leave(self, value: IRValue, source: PlacedValue, mesh: Mesh, layout: Layout) -> PlacedValue:
        """A value as it leaves its partition for one that wants it in a layout on a mesh."""
        if value.id not in self.leaving:
            held = source.layout
            if value.id in self.graph.outputs:
                layout = end_layout(held, source.mesh)
            elif not _are_alike(mesh, source.mesh):
                layout = Layout.replicated(source.mesh)
            else:
                pairs = zip(held.placements, layout.placements, strict=True)
                layout = Layout(
                    tuple(wanted if isinstance(p, Partial) else p for p, wanted in pairs)
                )
            layout = layout.normal(source.mesh, value.shape)
            conversion = self._conversion(value, held, layout, source.mesh)
            self.leaving[value.id] = self._convert(value, source, conversion)
        return self.leaving[value.id]

    def _enter(self, value: IRValue, leaving: PlacedValue, mesh: Mesh) -> PlacedValue:
        """A value as it enters a partition."""
        known = [holding for holding in self.held[value.id] if holding.mesh == mesh]
        if known:
            return known[0]
        layout = leaving.layout if _are_alike(mesh, leaving.mesh) else Layout.replicated(mesh)
        local = {}
        for device, ranges in zip(mesh.devices, layout.slices(mesh, value.shape), strict=True):
            builder = self.slots[device].builder
            shape = shape_of(ranges)
            strides = value.strides if shape == value.shape else None
            local[device] = builder.input(value.name, shape, value.dtype, strides=strides).id
        return self.add(value.id, PlacedValue(mesh, layout, local))


def _are_alike(one: Mesh, other: Mesh) -> bool:
    """Whether slots of one mesh have counterparts in another."""
    return (one.axes, one.sizes) == (other.axes, other.sizes)


def end_layout(layout: Layout, mesh: Mesh) -> Layout:
    """How an input enters and an output leaves: whole, but for the batch along an axis ``data``."""
    return Layout(
        tuple(
            placement if isinstance(placement, Shard) and axis == DATA else Replicate()
            for axis, placement in zip(mesh.axes, layout.placements, strict=True)
        )
    )


def _differentiable(holdings: Holdings) -> set[int]:
    """Values through which gradients go, if they go to parameters and inputs."""
    graph = holdings.graph
    found = {
        value.id
        for value in graph.values.values()
        if value.role in ("param", "input") and _is_continuous(value)
    }
    for node in graph.nodes:
        if node.op != "aten.detach.default" and not found.isdisjoint(node.inputs):
            made = (graph.values[value_id] for value_id in node.outputs)
            found.update(value.id for value in made if _is_continuous(value))
    return found


def _is_continuous(value: IRValue) -> bool:
    dtype = torch_dtype(value.dtype)
    return dtype.is_floating_point or dtype.is_complex


@dataclass
class StageWriter(NodeWriter):
    """Writes nodes and the collectives that their gradients need."""

    holdings: StageHoldings

    def add(self, node: IRNode, assignment: Assignment) -> LocalNode:
        """Write a node on the slots of its mesh. Raises PlanError."""
        written = super().add(node, assignment)
        for index, value_id in enumerate(node.outputs):
            self._give_to_first(written, index, value_id)
        return written

    def _settled(self, node: IRNode, assignment: Assignment) -> Assignment:
        """The assignment without the axes along which a gradient would go through a maximum."""
        assignment = super()._settled(node, assignment)
        if not any(assignment.splits) or self.holdings.differentiable.isdisjoint(node.outputs):
            return assignment
        bound = dimop_of(self.graph, node)
        splits = tuple(
            None if bound is not None and _compares(NodeAxis.of(bound, split), node) else split
            for split in assignment.splits
        )
        return Assignment(assignment.mesh, splits)

    def operands(
        self, node: IRNode, mesh: Mesh, split: SplitNode, sources: Sequence[PlacedValue | None]
    ) -> dict[str, list[IRValue | None]]:
        """What the part on each slot reads."""
        ready = [
            None if source is None else self._ready(node.inputs[index], source, split.axes, index)
            for index, source in enumerate(sources)
        ]
        return {
            device: [
                None if source is None else self.slots[device].value(source.local[device])
                for source in ready
            ]
            for device in mesh.devices
        }

    def _ready(
        self, value_id: int, source: PlacedValue, axes: Sequence[NodeAxis], index: int
    ) -> PlacedValue:
        """An input as parts read it."""
        value = self.graph.values[value_id]
        if value_id in self.holdings.differentiable:
            shared = [a for a in _axes(source.mesh) if _is_shared(axes[a], index)]
            source = self.holdings.for_parts(value, source, shared)
        for axis in _axes(source.mesh):
            if axes[axis].adds(index):
                source = self.holdings.along("masked_partial", value, source, axis)
        return source

    def _give_to_first(self, written: LocalNode, index: int, value_id: int) -> None:
        """Let one slot go on with the gradient of an output that all made alike."""
        if value_id not in self.holdings.differentiable:
            return
        held, value = self.holdings.held[value_id], self.graph.values[value_id]
        for axis in _axes(written.mesh):
            if written.axes[axis].repeats(index):
                held[-1] = self.holdings.along("masked_gradient", value, held[-1], axis)


def _compares(axis: NodeAxis, node: IRNode) -> bool:
    """Whether slots along an axis make terms that are not added, as a maximum's."""
    made = (axis.output(index) for index in range(len(node.outputs)))
    return any(isinstance(placement, Partial) and placement != Partial() for placement in made)


def _axes(mesh: Mesh) -> list[int]:
    """The axes of more than one slot."""
    return [axis for axis, size in enumerate(mesh.sizes) if size > 1]


def _is_shared(axis: NodeAxis, index: int) -> bool:
    """Whether parts along an axis read all of an input, so that each has a part of its gradient."""
    return (
        axis.split is not None
        and not axis.adds(index)
        and axis.input(index) == Replicate()
        and axis.gradient(index) == Partial()
    )
