"""Where each value is, and how it gets to where it is wanted.

A `PlacedValue` is a value on the slots of a mesh in a layout. `Holdings.fetch` gives the holding
that a node asks for: an existing one, or one made from the cheapest existing one by slices,
collectives and messages, which it writes into the slots. What it makes is kept, each step of the
way included, so that a conversion is done once however many nodes want it. Inputs and stored values
are nowhere until they are asked for, and then everywhere at no cost: each slot takes its slice.

What a value needs on its way is done where the slots stand, in the `PhaseStage` of who asks for it.
What a slot does for others is done in the place where it made the value: a stage sends its own
results, and what is made once a step travels once a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from shardwright.building.slots import (
    GroupMember,
    LocalCommunication,
    LocalSlice,
    PhaseStage,
    SlotGraph,
)
from shardwright.clusters import Cluster, Mesh
from shardwright.errors import PlanError
from shardwright.ir import IRGraph, IRValue
from shardwright.ir.tensor_meta import itemsize, sent_strides
from shardwright.sharding import (
    Crossing,
    Layout,
    Redistribution,
    RedistributionStep,
    convert,
    cross,
)
from shardwright.sharding.ranges import Ranges, shape_of, whole, within
from shardwright.sharding.transfer import SliceAssembly, Transfer


@dataclass(frozen=True, slots=True)
class PlacedValue:
    """A value on a mesh: the local value of each of its slots, and the place it was made in."""

    mesh: Mesh
    layout: Layout
    local: Mapping[str, int]
    place: PhaseStage = field(default_factory=PhaseStage)


@dataclass(slots=True)
class Holdings:
    """Everything that the slots hold of a graph's values.

    ``values`` has the graph's own, and those that `derive` adds beside them.
    """

    graph: IRGraph
    slots: Mapping[str, SlotGraph]
    cluster: Cluster
    values: dict[int, IRValue] = field(init=False)
    communications: list[LocalCommunication] = field(default_factory=list)
    held: dict[int, list[PlacedValue]] = field(default_factory=dict)
    loaded: dict[tuple[int, str, Ranges], int] = field(default_factory=dict)
    """Slices of inputs and stored values, by value, slot and ranges."""
    cut: dict[tuple[str, PhaseStage, int, Ranges], int] = field(default_factory=dict)
    """Slices of local values, by slot, where they were cut, local value and ranges within it."""

    def __post_init__(self) -> None:
        self.values = dict(self.graph.values)

    def derive(self, like: IRValue) -> IRValue:
        """A further value, of the kind of another: a gradient, or a term of one."""
        value = replace(like, id=-1 - len(self.values), role="tmp", producer=like.id, users=[])
        self.values[value.id] = value
        return value

    def add(self, value_id: int, holding: PlacedValue) -> PlacedValue:
        """Note that the slots hold a value, made where they stand now."""
        place = self.slots[holding.mesh.devices[0]].place
        holding = replace(holding, place=place)
        self.held.setdefault(value_id, []).append(holding)
        return holding

    def fetch(self, value_id: int, mesh: Mesh, layout: Layout) -> PlacedValue:
        """The value on this mesh in this layout, loaded or brought there where need be."""
        value = self.values[value_id]
        layout = layout.normal(mesh, value.shape)
        found = self._found(value_id, mesh, layout)
        if found is None and value.producer is None:
            return self._load(value, mesh, layout)
        return found or self.fetch_held(value_id, mesh, layout)

    def fetch_held(self, value_id: int, mesh: Mesh, layout: Layout) -> PlacedValue:
        """As `fetch`, from what the slots hold already: a stored value is not loaded again."""
        value, held = self.values[value_id], self.held[value_id]
        layout = layout.normal(mesh, value.shape)
        found = self._found(value_id, mesh, layout)
        if found is not None:
            return found
        _, source = min(
            (self._seconds(value, holding, mesh, layout), i) for i, holding in enumerate(held)
        )
        return self._bring(value, held[source], mesh, layout)

    def _found(self, value_id: int, mesh: Mesh, layout: Layout) -> PlacedValue | None:
        held = self.held.get(value_id, ())
        return next((h for h in held if (h.mesh, h.layout) == (mesh, layout)), None)

    def parts(self, value: IRValue, holding: PlacedValue) -> Iterator[LocalSlice]:
        """The slices of a holding, in the order of its mesh."""
        slices = holding.layout.slices(holding.mesh, value.shape)
        for device, ranges in zip(holding.mesh.devices, slices, strict=True):
            yield LocalSlice(device, holding.local[device], ranges)

    # --- inputs and stored values -------------------------------------------------------------

    def _load(self, value: IRValue, mesh: Mesh, layout: Layout) -> PlacedValue:
        slices = layout.slices(mesh, value.shape)
        local = {
            device: self._load_slice(value, device, ranges)
            for device, ranges in zip(mesh.devices, slices, strict=True)
        }
        return self.add(value.id, PlacedValue(mesh, layout, local))

    def _load_slice(self, value: IRValue, device: str, ranges: Ranges) -> int:
        key = (value.id, device, ranges)
        if key not in self.loaded:
            self.loaded[key] = self._new_slice(value, self.slots[device], ranges).id
        return self.loaded[key]

    def _new_slice(self, value: IRValue, slot: SlotGraph, ranges: Ranges) -> IRValue:
        all_of_it = ranges == whole(value.shape)
        strides = value.strides if all_of_it else None
        if value.role == "input":
            return slot.builder.input(value.name, shape_of(ranges), value.dtype, strides=strides)
        origin = value.placements or whole(value.shape)
        return slot.builder.graph.new_value(
            value.name,
            shape_of(ranges),
            value.dtype,
            role=value.role,
            strides=strides,
            names=value.names,
            init=value.init,
            placements=tuple(
                (start + first, end + first)
                for (start, end), (first, _) in zip(ranges, origin, strict=True)
            ),
        )

    # --- from one holding to another ----------------------------------------------------------

    def _seconds(self, value: IRValue, source: PlacedValue, mesh: Mesh, layout: Layout) -> float:
        """What it would take to bring the value."""
        if source.mesh == mesh:
            return self._conversion(value, source.layout, layout, mesh).seconds
        return self._crossing(value, source, mesh, layout).seconds

    def _conversion(self, value: IRValue, source: Layout, to: Layout, mesh: Mesh) -> Redistribution:
        size = itemsize(value.dtype)
        return convert(
            source, to, mesh=mesh, shape=value.shape, itemsize=size, cluster=self.cluster
        )

    def _crossing(
        self, value: IRValue, source: PlacedValue, mesh: Mesh, layout: Layout
    ) -> Crossing:
        return cross(
            source.layout,
            layout,
            source_mesh=source.mesh,
            target_mesh=mesh,
            shape=value.shape,
            itemsize=itemsize(value.dtype),
            cluster=self.cluster,
        )

    def _bring(
        self, value: IRValue, source: PlacedValue, mesh: Mesh, layout: Layout
    ) -> PlacedValue:
        if source.mesh == mesh:
            with self._once(source, mesh.devices):
                return self._convert(
                    value, source, self._conversion(value, source.layout, layout, mesh)
                )
        crossing = self._crossing(value, source, mesh, layout)
        givers = [device for device in source.mesh.devices if device not in mesh.devices]
        with self.at(source.place, givers), self._once(source, mesh.devices):
            leaving = self._convert(value, source, crossing.before)
            arriving = self._transfer(
                value, leaving, crossing.transfer, mesh, crossing.after.source
            )
            return self._convert(value, arriving, crossing.after)

    @contextmanager
    def at(self, place: PhaseStage, devices: Iterable[str]) -> Iterator[None]:
        """What these slots are given to do within is done at ``place``."""
        with ExitStack() as stack:
            for device in devices:
                stack.enter_context(self.slots[device].at(place))
            yield

    @contextmanager
    def _once(self, source: PlacedValue, devices: Sequence[str]) -> Iterator[None]:
        """What comes from a place that is visited once a step is brought there, not at each use."""
        with self.at(source.place, devices if source.place.phase == "prepare" else ()):
            yield

    def _convert(
        self, value: IRValue, holding: PlacedValue, conversion: Redistribution
    ) -> PlacedValue:
        """Take the steps of a conversion, keeping what each makes."""
        for step in conversion.steps:
            known = self._known(value.id, holding.mesh, step.after)
            holding = known or self._take(value, holding, conversion, step)
        return holding

    def _known(self, value_id: int, mesh: Mesh, layout: Layout) -> PlacedValue | None:
        """What was made of a value where the slots stand now."""
        wanted = (mesh, layout, self.slots[mesh.devices[0]].place)
        found = (h for h in self.held[value_id] if (h.mesh, h.layout, h.place) == wanted)
        return next(found, None)

    def _take(
        self,
        value: IRValue,
        holding: PlacedValue,
        conversion: Redistribution,
        step: RedistributionStep,
    ) -> PlacedValue:
        mesh, local = conversion.mesh, dict[str, int]()
        before, after = (
            dict(zip(mesh.devices, conversion.slices(layout), strict=True))
            for layout in (step.before, step.after)
        )
        for group in conversion.groups(step):
            held = {device: before[device] for device in group}
            wanted = {device: after[device] for device in group}
            local |= self._step(value, holding, step, held, wanted)
        return self.add(value.id, PlacedValue(mesh, step.after, local))

    def _step(
        self,
        value: IRValue,
        holding: PlacedValue,
        step: RedistributionStep,
        before: Mapping[str, Ranges],
        after: Mapping[str, Ranges],
    ) -> dict[str, int]:
        """A step of one group, whose members hold these slices; what each gets."""
        if step.kind == "slice":
            return {
                device: self._slice(device, holding.local[device], within(ranges, before[device]))
                for device, ranges in after.items()
            }
        gets = {device: self._new(device, value, shape_of(after[device])).id for device in after}
        members = tuple(GroupMember(d, holding.local[d], gets[d]) for d in after)
        self._communicate(LocalCommunication(step.kind, step.metadata, members))
        return gets

    def _new(self, device: str, value: IRValue, shape: tuple[int, ...]) -> IRValue:
        """A value of a slot that communication makes; contiguous unless it is all of the tensor."""
        strides = value.strides if shape == value.shape else None
        return self.slots[device].builder.input(value.name, shape, value.dtype, strides=strides)

    def _received(self, device: str, sent: IRValue) -> IRValue:
        """What a message brings: it lies as it was sent."""
        strides = sent_strides(sent.shape, sent.strides)
        return self.slots[device].builder.input(sent.name, sent.shape, sent.dtype, strides=strides)

    def _communicate(self, communication: LocalCommunication) -> None:
        self.communications.append(communication)
        for member in communication.members:
            self.slots[member.device].add(communication)

    # --- messages -----------------------------------------------------------------------------

    def _transfer(
        self, value: IRValue, holding: PlacedValue, transfer: Transfer, mesh: Mesh, layout: Layout
    ) -> PlacedValue:
        """Send what slots lack, and put together what they need."""
        origin = {part.device: part.ranges for part in self.parts(value, holding)}
        local = {
            assembly.device: self._assemble(value, holding, origin, assembly)
            for assembly in transfer.assemblies
        }
        return self.add(value.id, PlacedValue(mesh, layout, local))

    def _assemble(
        self,
        value: IRValue,
        holding: PlacedValue,
        origin: Mapping[str, Ranges],
        assembly: SliceAssembly,
    ) -> int:
        """One slot's slice, of pieces."""
        pieces = []
        for piece in assembly.pieces:
            inside = within(piece.ranges, origin[piece.source])
            sent = self._slice(piece.source, holding.local[piece.source], inside)
            if not piece.is_sent:
                pieces.append(sent)
                continue
            got = self._received(piece.destination, self.slots[piece.source].value(sent)).id
            members = (
                GroupMember(piece.source, sent, None),
                GroupMember(piece.destination, None, got),
            )
            self._communicate(LocalCommunication("send", {}, members))
            pieces.append(got)
        builder = self.slots[assembly.device].builder
        if not pieces:
            raise PlanError(
                f"%{value.name} {value.dtype}{list(value.shape)} has no elements, so that no slot "
                "needs what another one makes; plan such a graph on one slot (devices=1), or "
                "capture it with tensors that have elements"
            )
        values = [builder.graph.values[value_id] for value_id in pieces]
        for dim, count in assembly.joins:
            runs = [values[i : i + count] for i in range(0, len(values), count)]
            values = [builder.call("aten.cat.default", run, dim) for run in runs]
        return values[0].id

    def _slice(self, device: str, local: int, ranges: Ranges) -> int:
        """A slice of a local value; the value itself where it is all of it."""
        slot = self.slots[device]
        value = slot.value(local)
        if ranges == whole(value.shape):
            return local
        key = (device, slot.place, local, ranges)
        if key not in self.cut:
            for dim, (start, end) in enumerate(ranges):
                if (start, end) != (0, value.shape[dim]):
                    value = slot.builder.call("aten.slice.Tensor", value, dim, start, end)
            self.cut[key] = value.id
        return self.cut[key]
