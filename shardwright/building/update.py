"""The update of a training step on the slots: what stands behind its backward, node by node.

A parameter belongs to the mesh that first read it. Its gradient is brought together there, in the
layout in which it lies, and each slot of the mesh updates its slice; with ZeRO the slice is smaller
still, as each slot along the axis ``data`` has its own. State lies as the update needs it. Whoever
else holds the parameter gets the new contents from there, so that all copies stay the same.

Clipping and the optimizers' markers become one call a slot for all of its parameters. What else
stands there (gradients added to older ones, scaled, …) is done on each slot's slice where it works
element by element, and on all of the tensor else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.building.gradients import NO_GRADIENT, GradientWriter
from shardwright.building.holdings import Holdings, PlacedValue
from shardwright.building.localize import (
    Ends,
    LocalNode,
    empty_holdings,
    finish,
    layer_borders,
    write_forward,
)
from shardwright.building.slots import Localized, PhaseStage, SlotGraph
from shardwright.clusters import Mesh
from shardwright.errors import PlanError
from shardwright.ir import Builder, IRNode, IRValue
from shardwright.ir.operators import is_marker
from shardwright.ir.tensor_meta import torch_dtype
from shardwright.ops.optimizers import OPTIMIZERS, RATE_DTYPES, OptimizerTensors
from shardwright.planning.plan import Plan
from shardwright.planning.rules import DATA
from shardwright.planning.step import PreparedStep
from shardwright.planning.step_graph import is_elementwise, parameters_of
from shardwright.sharding import Layout, Partial, Replicate, Shard


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """Where a parameter is updated, and how what has its shape lies there."""

    mesh: Mesh
    layout: Layout
    shape: tuple[int, ...]

    def layout_of(self, value: IRValue) -> Layout:
        """How a value lies there; numbers are on every slot."""
        return self.layout if value.shape == self.shape else Layout.replicated(self.mesh)


class UpdateWriter:
    """Writes the update on the slots.

    Invariant: the gradient and the state of a parameter, and the parameter's new contents,
    lie as its `ParameterLayout` says.
    """

    def __init__(
        self,
        step: PreparedStep,
        plan: Plan,
        holdings: Holdings,
        gradients: GradientWriter,
        device_kind: str = "cpu",
    ) -> None:
        assert plan.training is not None
        self._rate_dtype = RATE_DTYPES.get(device_kind)
        self._graph = step.graph
        self._zero = plan.training.zero
        self._holdings = holdings
        self._gradients = gradients
        self._owners = parameters_of(step.graph)
        self._made_by_backward = frozenset(
            value_id
            for node in step.graph.nodes
            if node.op == "Backward"
            for value_id in node.outputs
        )
        self._homes: dict[int, ParameterLayout] = {}

    def add(self, node: IRNode) -> None:
        """Write a node that stands behind the backward. Raises PlanError for unknown markers."""
        if node.op in OPTIMIZERS:
            self._optimize(node)
        elif node.op in _MARKERS:
            _MARKERS[node.op](self, node)
        elif is_marker(node.op):
            raise PlanError(
                f"{node.op} is no marker that can be split over slots; known are "
                f"{', '.join((*OPTIMIZERS, *_MARKERS))}"
            )
        else:
            self._operate(node)

    # --- where things are ---------------------------------------------------------------------

    def _home(self, value_id: int) -> ParameterLayout:
        """Where the parameter is updated that a value belongs to, or is."""
        parameter = self._owners.get(value_id, value_id)
        if parameter not in self._homes:
            if parameter not in self._holdings.held:
                raise PlanError(NO_GRADIENT.format(name=self._graph.values[parameter].names[0]))
            held = self._holdings.held[parameter][0]
            shape, layout = self._graph.values[parameter].shape, held.layout
            if self._zero:
                layout = split_further(layout, held.mesh, shape)
            self._homes[parameter] = ParameterLayout(held.mesh, layout, shape)
        return self._homes[parameter]

    def _at(self, value_id: int, home: ParameterLayout) -> PlacedValue:
        """A value at a home; what the slots hold of a parameter is not loaded once more."""
        layout = home.layout_of(self._graph.values[value_id])
        if value_id in self._made_by_backward:
            return self._gradients.total(value_id, home.mesh, layout)
        if value_id in self._holdings.held:
            return self._holdings.fetch_held(value_id, home.mesh, layout)
        return self._holdings.fetch(value_id, home.mesh, layout)

    def _gradient(self, value_id: int) -> PlacedValue:
        """A gradient at the home of its parameter."""
        return self._at(value_id, self._home(value_id))

    def _add(self, value_id: int, home: ParameterLayout, local: Mapping[str, int]) -> None:
        layout = home.layout_of(self._graph.values[value_id])
        self._holdings.add(value_id, PlacedValue(home.mesh, layout, local))

    # --- markers ------------------------------------------------------------------------------

    def _optimize(self, node: IRNode) -> None:
        """New parameters and states, by one call a slot."""
        optimizer = OPTIMIZERS[node.op]
        count = len(node.attrs["parameters"])
        rate, *rest = node.inputs
        parameters, gradients, *states = _lists(rest, count)
        assert len(states) == len(optimizer.state(node.attrs))
        homes = [self._home(value_id) for value_id in parameters]
        held = [
            [self._gradient(value_id) for value_id in gradients],
            *(
                [self._at(value_id, home) for value_id, home in zip(ids, homes, strict=True)]
                for ids in (parameters, *states)
            ),
        ]
        made: list[dict[str, int]] = [{} for _ in node.outputs]
        for device, slot in self._holdings.slots.items():
            at = [i for i, home in enumerate(homes) if device in home.mesh.devices]
            if not at:
                continue
            grads, olds, *old_states = (
                [_dense(slot, holdings[i].local[device]) for i in at] for holdings in held
            )
            new = optimizer.update(
                slot.builder,
                node.attrs,
                self._rate(rate, slot),
                grads,
                OptimizerTensors(olds, old_states),
            )
            for k, values in enumerate((new.parameters, *new.states)):
                for i, value in zip(at, values, strict=True):
                    made[k * count + i][device] = value.id
        for k, value_id in enumerate(node.outputs):
            self._add(value_id, homes[k % count], made[k])

    def _rate(self, value_id: int, slot: SlotGraph) -> IRValue:
        """The learning rate on one slot, as its kernels read it."""
        mesh = Mesh((), (), (slot.device,))
        held = self._holdings.fetch(value_id, mesh, Layout.replicated(mesh))
        rate = slot.value(held.local[slot.device])
        if self._rate_dtype is None:
            return rate
        return slot.builder.call("aten.to.dtype", rate, self._rate_dtype)  # type: ignore[no-any-return]

    def _clip_norm(self, node: IRNode) -> None:
        """Gradients scaled by their norm over all slots."""
        gradients = [self._gradient(value_id) for value_id in node.inputs]
        norm = total_norm(self._holdings, node, gradients)

        def write(slot: SlotGraph, values: Sequence[IRValue]) -> Sequence[IRValue]:
            return scaled(slot.builder, node, slot.value(norm.local[slot.device]), values)

        self._on_slots(node.inputs, node.outputs[1:], gradients, write)

    def _clip_value(self, node: IRNode) -> None:
        """Gradients within limits."""
        gradients = [self._gradient(value_id) for value_id in node.inputs]

        def write(slot: SlotGraph, values: Sequence[IRValue]) -> Sequence[IRValue]:
            return limited(slot.builder, node.attrs, values)

        self._on_slots(node.inputs, node.outputs, gradients, write)

    def _nothing(self, node: IRNode) -> None:
        """Gradients begin with zeros at each step."""

    def _on_slots(
        self,
        old: Sequence[int],
        new: Sequence[int],
        gradients: Sequence[PlacedValue],
        write: Callable[[SlotGraph, Sequence[IRValue]], Sequence[IRValue]],
    ) -> None:
        """Gradients in the place of others, all those of a slot by one call."""
        made: list[dict[str, int]] = [{} for _ in new]
        for device, slot in self._holdings.slots.items():
            at = [i for i, holding in enumerate(gradients) if device in holding.local]
            if at:
                values = [slot.value(gradients[i].local[device]) for i in at]
                for i, value in zip(at, write(slot, values), strict=True):
                    made[i][device] = value.id
        for before, after, local in zip(old, new, made, strict=True):
            self._add(after, self._home(before), local)

    # --- operators ----------------------------------------------------------------------------

    def _operate(self, node: IRNode) -> None:
        """An operator between markers: on slices where it works element by element."""
        owned = next((v for v in node.inputs if v in self._owners), None)
        if owned is not None and is_elementwise(self._graph, node):
            self._write(node, self._home(owned))
        else:
            mesh = self._mesh_of(node) if owned is None else self._home(owned).mesh
            self._write(node, ParameterLayout(mesh, Layout.replicated(mesh), ()))

    def _mesh_of(self, node: IRNode) -> Mesh:
        """Where the first of a node's inputs is that is anywhere; all slots where none is."""
        held = (self._holdings.held.get(value_id) for value_id in node.inputs)
        found = next((holdings[0].mesh for holdings in held if holdings), None)
        slots = self._holdings.slots
        return found or Mesh(("slots",), (len(slots),), tuple(slots))

    def _write(self, node: IRNode, home: ParameterLayout) -> None:
        """The operator on each slot of a mesh."""
        held = [self._at(value_id, home) for value_id in node.inputs]
        made: list[dict[str, int]] = [{} for _ in node.outputs]
        for device in home.mesh.devices:
            slot = self._holdings.slots[device]
            inputs = [holding.local[device] for holding in held]
            results = slot.builder.emit(
                node.op, inputs, node.attrs, scopes=node.scopes, source=node.source
            )
            results = results if isinstance(results, list) else [results]
            for local, value in zip(made, results, strict=True):
                local[device] = value.id
        for value_id, local in zip(node.outputs, made, strict=True):
            self._add(value_id, home, local)


_MARKERS: dict[str, Callable[[UpdateWriter, IRNode], None]] = {
    "clip_grad_norm": UpdateWriter._clip_norm,
    "clip_grad_value": UpdateWriter._clip_value,
    "zero_grad": UpdateWriter._nothing,
}
"""Markers that are no optimizers."""


def split_further(layout: Layout, mesh: Mesh, shape: tuple[int, ...]) -> Layout:
    """The layout with the tensor split along the axis ``data`` too, where it can be.

    Of dimensions that nothing else splits and that are long enough: one that splits evenly before
    others, the outermost of several.
    """
    if DATA not in mesh.axes:
        return layout
    axis = mesh.axis(DATA)
    size = mesh.sizes[axis]
    taken = {found.dim for found in layout.placements if isinstance(found, Shard)}
    free = [dim for dim, length in enumerate(shape) if dim not in taken and length >= size]
    if not free or not isinstance(layout.placements[axis], Replicate):
        return layout
    dim = min(free, key=lambda dim: (shape[dim] % size > 0, dim))
    return layout.replace(axis, Shard(dim)).normal(mesh, shape)


def _dense(slot: SlotGraph, value_id: int) -> IRValue:
    """A slot's value without gaps, in the order of its dimensions."""
    value = slot.value(value_id)
    if value.strides is None:
        return value
    return slot.builder.call("aten.contiguous.default", value)  # type: ignore[no-any-return]


def _lists(value_ids: Sequence[int], count: int) -> Iterator[Sequence[int]]:
    """Ids of so many parameters after another."""
    return (value_ids[start : start + count] for start in range(0, len(value_ids), count))


# --- clipping -------------------------------------------------------------------------------------
#
# The norm of all gradients is that of one long vector. Each slot makes the sum of powers (or the
# largest magnitude) of what it has to count, one reduction over all slots of the plan makes the
# whole, and every slot scales its gradients by the same number. An element counts once, on however
# many slots it lies.


GUARD = 1e-6
"""What torch adds to the norm before it divides by it."""


@dataclass(frozen=True, slots=True)
class _GradientNorm:
    """A norm as a sum of powers of magnitudes (``order``), or the largest of them (infinity)."""

    order: float

    @property
    def reduction(self) -> Partial:
        return Partial("max" if math.isinf(self.order) else "sum")

    def term(self, builder: Builder, tensors: Sequence[IRValue], total: IRValue) -> IRValue:
        """A slot's term: 0-d, of the total's dtype."""
        dtype = torch_dtype(total.dtype)
        tensors = [tensor for tensor in tensors if tensor.numel]
        if not tensors:
            return builder.call("aten.zeros.default", [], dtype=dtype)  # type: ignore[no-any-return]
        norms = builder.call("aten._foreach_norm.Scalar", tensors, self.order, dtype=dtype)
        norm = builder.call("aten.stack.default", norms)
        norm = builder.call("aten.linalg_vector_norm.default", norm, self.order)
        return norm if math.isinf(self.order) else self._power(builder, norm, self.order)

    def whole(self, builder: Builder, reduced: IRValue) -> IRValue:
        """The norm from the terms of all slots, reduced."""
        if math.isinf(self.order):
            return reduced
        return self._power(builder, reduced, 1 / self.order)

    def _power(self, builder: Builder, value: IRValue, exponent: float) -> IRValue:
        """Roots and squares by the operators that round once."""
        if exponent == 1:
            return value
        if exponent == 0.5:
            return builder.call("aten.sqrt.default", value)  # type: ignore[no-any-return]
        return builder.call("aten.pow.Tensor_Scalar", value, exponent)  # type: ignore[no-any-return]


def total_norm(holdings: Holdings, node: IRNode, gradients: Sequence[PlacedValue]) -> PlacedValue:
    """The norm of all gradients, held by every slot. Raises PlanError for orders below 1."""
    order = float(node.attrs["norm_type"])
    if not order >= 1:
        raise PlanError(f"clip_grad_norm with norm_type={order}; from 1 up, or infinity, is known")
    norm, total = _GradientNorm(order), holdings.graph.values[node.outputs[0]]
    counted = _counted(gradients)
    slots = Mesh(("slots",), (len(holdings.slots),), tuple(holdings.slots))
    local = {}
    for device, slot in holdings.slots.items():
        tensors = [slot.value(value_id) for value_id in counted.get(device, ())]
        local[device] = norm.term(slot.builder, tensors, total).id
    layout = Layout.of(norm.reduction).normal(slots, ())
    terms = holdings.derive(total)
    holdings.add(terms.id, PlacedValue(slots, layout, local))
    reduced = holdings.fetch(terms.id, slots, Layout.of(Replicate()))
    found = {}
    for device, slot in holdings.slots.items():
        found[device] = norm.whole(slot.builder, slot.value(reduced.local[device])).id
    return holdings.add(total.id, PlacedValue(slots, reduced.layout, found))


def _counted(gradients: Sequence[PlacedValue]) -> dict[str, list[int]]:
    """What each slot counts: a slice that several slots hold is the first one's."""
    counted: dict[str, list[int]] = {}
    for holding in gradients:
        for device, coordinate in zip(
            holding.mesh.devices, holding.mesh.coordinates(), strict=True
        ):
            copies = zip(coordinate, holding.layout.placements, strict=True)
            if not any(at and isinstance(found, Replicate) for at, found in copies):
                counted.setdefault(device, []).append(holding.local[device])
    return counted


def scaled(
    builder: Builder, node: IRNode, norm: IRValue, gradients: Sequence[IRValue]
) -> Sequence[IRValue]:
    """A slot's gradients, smaller where the norm is more than it may be."""
    guarded = builder.call("aten.add.Scalar", norm, GUARD)
    share = builder.call("aten.mul.Scalar", builder.call("aten.reciprocal.default", guarded),
                         float(node.attrs["max_norm"]))  # fmt: skip
    share = builder.call("aten.clamp.default", share, max=1.0)
    return builder.call("aten._foreach_mul.Tensor", gradients, share)  # type: ignore[no-any-return]


def limited(
    builder: Builder, attrs: Mapping[str, float], gradients: Sequence[IRValue]
) -> Sequence[IRValue]:
    """A slot's gradients, each element within ``clip_value`` of zero."""
    limit = float(attrs["clip_value"])
    found = builder.call("aten._foreach_clamp_min.Scalar", gradients, -limit)
    return builder.call("aten._foreach_clamp_max.Scalar", found, limit)  # type: ignore[no-any-return]


# --- the whole step -------------------------------------------------------------------------------


def localize_step(step: PreparedStep, plan: Plan, device_kind: str = "cpu") -> Localized:
    """The slots of a planned training step: forward, backward and update.

    Raises PlanError where the plan cannot be carried out, GraphError where an operator has no
    gradient.
    """
    assert plan.training is not None
    graph = step.graph
    holdings = empty_holdings(graph, plan)
    places = [
        PhaseStage("prepare") if position in step.prepare else PhaseStage("forward", stage)
        for position, stage in enumerate(plan.training.stages[: step.forward])
    ]
    written = write_forward(graph, plan, holdings, places)
    borders = layer_borders(graph)
    backward = next(node for node in graph.nodes if node.op == "Backward")
    gradients = GradientWriter(holdings, backward, plan.training.microbatches, device_kind)
    update = UpdateWriter(step, plan, holdings, gradients, device_kind)
    ends = Ends(graph, holdings, plan.training.microbatches)
    ends.results()
    _backward(gradients, written, borders)
    for slot in holdings.slots.values():
        slot.go(PhaseStage("update"))
    for node in graph.nodes[step.forward :]:
        if node is not backward:
            update.add(node)
    localized = finish(holdings, ends)
    for device, slot in holdings.slots.items():
        slot.replace(gradients.replaced(device))
    return replace(localized, updates=[*localized.updates, *gradients.updates()])


def _backward(
    gradients: GradientWriter, written: Mapping[int, LocalNode], borders: Collection[int]
) -> None:
    """Write the gradients of everything that the loss depends on, last node first."""
    gradients.begin(list(written.values()))
    for position, stands in reversed(list(written.items())):
        gradients.through(stands)
        if position in borders:
            gradients.border(stands)
