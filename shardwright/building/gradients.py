"""The backward of a training step, from how its forward stands on the slots.

Node by node, the last first, each slot differentiates what it computes: its part of the node, from
the gradients of what that part makes to those of what it reads. How gradients lie follows from how
the values do, along each axis of the mesh:

    value       its gradient
    Shard       Shard, each slot has the gradient of its part
    Replicate   Replicate, all of it everywhere
    Partial     Replicate, since the gradient of a sum is that of each term

What the backward of a split node makes for an input that the split does not touch is Partial: each
slot has the part that goes through its own outputs. It stays so through nodes that every slot does
whole where nothing but parameters comes before them: a backward is linear in what it is given, and
parameters' gradients are put together once a step. Between what is made and what is wanted stand
the conversions of `holdings`, found as those of the forward are: so an all_gather of the forward
gets its reduce_scatter, a message its answer, an input that all slots read whole its all_reduce.

The gradient of a parameter is added up where it is made, over the microbatches, in accumulators,
and brought together once a step: `total` does it, for the update of the parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwright.autodiff.differentiate import Differentiator, add_into
from shardwright.autodiff.needed import needing_gradients
from shardwright.autodiff.vjp import Vjps
from shardwright.building.holdings import Holdings, PlacedValue
from shardwright.building.localize import LocalNode
from shardwright.building.slots import BORDER, LocalSlice, PhaseStage
from shardwright.clusters import Mesh
from shardwright.errors import PlanError
from shardwright.ir import Builder, IRGraph, IRNode, IRValue
from shardwright.ir.tensor_meta import torch_dtype
from shardwright.sharding import Layout, Partial, Replicate
from shardwright.sharding.ranges import whole

_Key = tuple[Mesh, Layout, PhaseStage]
"""Which contributions to a gradient are added where they are made."""

NO_GRADIENT = (
    "the loss does not depend on parameter {name!r}, so it has no gradient; freeze it "
    "(requires_grad_(False)) or leave it out of the optimizer"
)

_Local = dict[str, IRValue]
"""A value of each slot."""


@dataclass(slots=True)
class _Accumulated:
    """What a parameter's gradient is added into on one slot: before and after a microbatch."""

    before: IRValue
    after: IRValue


class GradientWriter:
    """Writes the backward on the slots, and knows where each gradient is.

    ``backward`` is the graph's ``Backward`` node.
    """

    def __init__(
        self,
        holdings: Holdings,
        backward: IRNode,
        microbatches: int = 1,
        device_kind: str = "cpu",
    ) -> None:
        self._holdings = holdings
        self._graph = holdings.graph
        self._slots = holdings.slots
        self._microbatches = microbatches
        vjps = Vjps(device_kind)
        self._differentiators = {
            device: Differentiator(slot.builder, vjps) for device, slot in self._slots.items()
        }
        self._backward = backward
        self._parameters = _parameters(holdings.graph, backward)
        self._trained = frozenset(self._parameters.values())
        self._required = needing_gradients(holdings.graph, self._trained)
        self._made: dict[int, dict[_Key, _Local]] = {}
        """Contributions to the gradient of each value."""
        self._whole_axes: dict[int, frozenset[int]] = {}
        """By node: the axes along which it is done whole, and all that it depends on."""
        self._terms: dict[int, list[int]] = {}
        """The same as derived values, once nothing is added to them any more."""
        self._accumulated: dict[tuple[int, _Key, str], _Accumulated] = {}

    def begin(self, written: Sequence[LocalNode]) -> None:
        """Begin at the loss of a forward that stands as ``written`` says."""
        self._note_whole_axes(written)
        loss = self._graph.values[self._backward.inputs[0]]
        held = self._holdings.held[loss.id][0]
        place = PhaseStage("backward", held.place.stage)
        with self._holdings.at(place, held.mesh.devices):
            seed = self._seed(loss, held.mesh)
            self._contribute(loss.id, Layout.replicated(held.mesh), held.mesh, seed, {})

    def through(self, written: LocalNode) -> None:
        """Go backward through a node."""
        node, mesh = written.node, written.mesh
        if not any(output in self._made for output in node.outputs):
            return
        for device in mesh.devices:
            self._slots[device].go(PhaseStage("backward", written.place.stage))
        wanted = [
            index
            for index, value_id in enumerate(node.inputs)
            if value_id in self._required and written.inputs[index] is not None
        ]
        kept = self._axes_kept_partial(written)
        given = self._given(written, kept)
        found: dict[str, Mapping[int, IRValue]] = {
            device: self._differentiators[device].backward(
                written.nodes[device],
                given[device],
                {_held(written, index).local[device] for index in wanted},
            )
            for device in mesh.devices
        }
        own = {device: _own(found[device], given[device]) for device in mesh.devices}
        for index in self._distinct(written, wanted):
            source = _held(written, index)
            layout = Layout(
                tuple(
                    Partial() if number in kept else axis.gradient(index)
                    for number, axis in enumerate(written.axes)
                )
            )
            local = {
                device: gradient
                for device in mesh.devices
                if (gradient := found[device].get(source.local[device])) is not None
            }
            self._contribute(node.inputs[index], layout, mesh, local, own)

    def border(self, written: LocalNode) -> None:
        """One repeated layer meets the next before this node."""
        for device in written.mesh.devices:
            self._slots[device].go(PhaseStage("backward", written.place.stage))
            self._slots[device].add(BORDER)

    def total(self, gradient: int, mesh: Mesh, layout: Layout) -> PlacedValue:
        """The sum of the terms of a parameter's gradient, on this mesh in this layout."""
        parameter = self._parameters[gradient]
        if parameter not in self._made:
            name = self._graph.values[parameter].names[0]
            raise PlanError(NO_GRADIENT.format(name=name))
        return self._total(parameter, mesh, layout)

    def updates(self) -> list[tuple[LocalSlice, LocalSlice]]:
        """Accumulators, and what replaces them after a microbatch."""
        return [
            (
                LocalSlice(device, found.before.id, whole(found.before.shape)),
                LocalSlice(device, found.after.id, whole(found.after.shape)),
            )
            for (_, _, device), found in self._accumulated.items()
        ]

    def replaced(self, device: str) -> Mapping[int, Sequence[IRNode]]:
        """By what nodes of a slot's forward have to be replaced, so that they save what is read."""
        return self._differentiators[device].replaced

    # --- into a node --------------------------------------------------------------------------

    def _seed(self, loss: IRValue, mesh: Mesh) -> _Local:
        """The gradient of the loss of a microbatch: its share of the whole."""
        share = 1.0 / self._microbatches
        given = self._backward.inputs[1:]
        if not given:
            dtype = torch_dtype(loss.dtype)
            return {
                device: self._builder(device).call(
                    "aten.full.default", list(loss.shape), share, dtype=dtype
                )
                for device in mesh.devices
            }
        source = self._holdings.fetch(given[0], mesh, Layout.replicated(mesh))
        values = {device: self._slots[device].value(v) for device, v in source.local.items()}
        if self._microbatches == 1:
            return values
        return {
            device: self._builder(device).call("aten.mul.Scalar", value, share)
            for device, value in values.items()
        }

    def _note_whole_axes(self, written: Sequence[LocalNode]) -> None:
        """Find along which axes a node, and all before it that has a gradient, is done whole."""
        made: dict[int, tuple[Mesh, frozenset[int]]] = {}
        for stands in written:
            axes = frozenset(
                number for number, axis in enumerate(stands.axes) if axis.split is None
            )
            for value_id in stands.node.inputs:
                if value_id in self._required and value_id in made:
                    mesh, before = made[value_id]
                    axes = axes & before if mesh == stands.mesh else frozenset()
            self._whole_axes[stands.node.id] = axes
            made |= dict.fromkeys(stands.node.outputs, (stands.mesh, axes))

    def _axes_kept_partial(self, written: LocalNode) -> frozenset[int]:
        """The axes along which a node goes on with terms of its gradients."""
        groups = [key for value_id in written.node.outputs for key in self._made.get(value_id, {})]
        return frozenset(
            number
            for number in self._whole_axes[written.node.id]
            if all(
                mesh == written.mesh and layout.placements[number] == Partial()
                for mesh, layout, _ in groups
            )
        )

    def _given(self, written: LocalNode, kept: Collection[int]) -> dict[str, dict[int, IRValue]]:
        """The gradients of what a node made, by local value, for each slot.

        Along the axes in ``kept`` they are terms of a sum.
        """
        mesh = written.mesh
        given: dict[str, dict[int, IRValue]] = {device: {} for device in mesh.devices}
        for index, value_id in enumerate(written.node.outputs):
            if value_id not in self._made:
                continue
            made = written.outputs[index]
            layout = _mirror(made.layout, written.node)
            for number in kept:
                layout = layout.replace(number, Partial())
            total = self._total(value_id, mesh, layout)
            for device, coordinate in zip(mesh.devices, mesh.coordinates(), strict=True):
                # What all slots made alike has one gradient: the first slot goes on with it.
                if not any(
                    at and axis.repeats(index)
                    for at, axis in zip(coordinate, written.axes, strict=True)
                ):
                    local = self._slots[device].value(total.local[device])
                    given[device][made.local[device]] = local
        return given

    def _distinct(self, written: LocalNode, wanted: Sequence[int]) -> Iterator[int]:
        """One input of those that are the same local values."""
        seen: set[tuple[int, ...]] = set()
        for index in wanted:
            local = tuple(_held(written, index).local.values())
            if local not in seen:
                seen.add(local)
                yield index

    # --- out of a node ------------------------------------------------------------------------

    def _contribute(
        self,
        value_id: int,
        layout: Layout,
        mesh: Mesh,
        local: Mapping[str, IRValue],
        own: Mapping[str, Collection[int]],
    ) -> None:
        """Add to the gradient of a value; slots without a gradient add nothing.

        ``own`` are the slots' values that are no other value's gradient too.
        """
        if not local:
            return
        layout = layout.normal(mesh, self._graph.values[value_id].shape)
        key = (mesh, layout, self._slots[mesh.devices[0]].place)
        complete = self._with_zeros(value_id, layout, mesh, local)
        groups = self._made.setdefault(value_id, {})
        if value_id in self._trained and self._microbatches > 1:
            groups[key] = {
                device: self._accumulate(
                    value_id, key, device, gradient, own=gradient.id in own.get(device, ())
                )
                for device, gradient in complete.items()
            }
        elif key in groups:
            groups[key] = {
                device: self._builder(device).call("aten.add.Tensor", groups[key][device], gradient)
                for device, gradient in complete.items()
            }
        else:
            groups[key] = complete

    def _with_zeros(
        self, value_id: int, layout: Layout, mesh: Mesh, local: Mapping[str, IRValue]
    ) -> _Local:
        """A gradient on each slot, zeros where there is none."""
        value = self._graph.values[value_id]
        slices = layout.slices(mesh, value.shape)
        complete: _Local = {}
        for device, ranges in zip(mesh.devices, slices, strict=True):
            shape = [end - start for start, end in ranges]
            complete[device] = local.get(device) or self._builder(device).call(
                "aten.zeros.default", shape, dtype=torch_dtype(value.dtype)
            )
        return complete

    def _accumulate(
        self, value_id: int, key: _Key, device: str, gradient: IRValue, *, own: bool
    ) -> IRValue:
        """The sum over the microbatches up to this one, this gradient included."""
        value = self._graph.values[value_id]
        found = self._accumulated.get((value_id, key, device))
        if found is None:
            zeros = self._slots[device].zeros(f"grad.{value.name}", gradient.shape, gradient.dtype)
            found = self._accumulated[value_id, key, device] = _Accumulated(zeros, zeros)
        builder = self._builder(device)
        if own:
            found.after = add_into(builder, found.after, gradient)
        else:
            found.after = builder.call("aten.add.Tensor", found.after, gradient)
        return found.after

    # --- sums ---------------------------------------------------------------------------------

    def _derived(self, value_id: int) -> list[int]:
        """The contributions to a value's gradient, as values that can be fetched."""
        if value_id not in self._terms:
            self._terms[value_id] = [
                self._term(value_id, key, local)
                for key, local in self._made.get(value_id, {}).items()
            ]
        return self._terms[value_id]

    def _term(self, value_id: int, key: _Key, local: _Local) -> int:
        """A contribution as a value: what a parameter's is after the last microbatch is read."""
        mesh, layout, place = key
        if value_id in self._trained:
            place = PhaseStage("update")
        term = self._holdings.derive(self._graph.values[value_id]).id
        with self._holdings.at(place, mesh.devices):
            ids = {device: value.id for device, value in local.items()}
            self._holdings.add(term, PlacedValue(mesh, layout, ids))
        return term

    def _total(self, value_id: int, mesh: Mesh, layout: Layout) -> PlacedValue:
        """The gradient of a value on this mesh in this layout, the terms made last first."""
        terms = self._derived(value_id)
        held = [self._holdings.fetch(term, mesh, layout) for term in terms]
        if len(held) == 1:
            return held[0]
        local = {device: self._sum(device, held) for device in mesh.devices}
        total = self._holdings.derive(self._graph.values[value_id])
        return self._holdings.add(total.id, PlacedValue(mesh, held[0].layout, local))

    def _sum(self, device: str, terms: Sequence[PlacedValue]) -> int:
        """What a slot has of several terms, added in their order."""
        slot = self._slots[device]
        first, *others = (slot.value(term.local[device]) for term in terms)
        total = first
        for other in others:
            total = slot.builder.call("aten.add.Tensor", total, other)
        return total.id

    def _builder(self, device: str) -> Builder:
        return self._slots[device].builder


def _held(written: LocalNode, index: int) -> PlacedValue:
    """How an input that is read is held."""
    holding = written.inputs[index]
    assert holding is not None
    return holding


def _own(found: Mapping[int, IRValue], given: Mapping[int, IRValue]) -> set[int]:
    """Gradients that a node's backward made and gave once: nothing else is waiting for them."""
    counts = Counter(gradient.id for gradient in found.values())
    counts.update(gradient.id for gradient in given.values())
    return {value_id for value_id, count in counts.items() if count == 1} - {
        gradient.id for gradient in given.values()
    }


def _mirror(layout: Layout, node: IRNode) -> Layout:
    """How the gradient of a value lies. Raises PlanError for terms that are no sum."""
    placements = []
    for placement in layout.placements:
        if isinstance(placement, Partial) and placement.op != "sum":
            raise PlanError(
                f"{node.op} makes a value whose slots hold terms of a {placement.op}, through "
                "which no gradient goes; let the plan keep this node whole"
            )
        placements.append(Replicate() if isinstance(placement, Partial) else placement)
    return Layout(tuple(placements))


def _parameters(graph: IRGraph, backward: IRNode) -> dict[int, int]:
    """The parameter of each gradient; parts of one name have theirs in the order of their ids."""
    by_name: dict[str, list[int]] = {}
    for value in graph.stored():
        by_name.setdefault(value.names[0], []).append(value.id)
    left = {name: iter(ids) for name, ids in by_name.items()}
    names = backward.attrs["parameters"]
    return {
        gradient: next(left[name]) for gradient, name in zip(backward.outputs, names, strict=True)
    }
