"""The ends of a graph whose nodes are all written: inputs, outputs, and new contents.

In a training step a number that the forward gives, such as the loss, is added up over the
microbatches: where it is a floating-point number, it comes out as their mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from shardwright.building.holdings import Holdings, PlacedValue
from shardwright.building.slots import LocalSlice, PhaseStage
from shardwright.clusters import Mesh
from shardwright.ir import IRGraph, IRValue
from shardwright.ir.tensor_meta import torch_dtype
from shardwright.sharding import Layout
from shardwright.sharding.ranges import whole


@dataclass(slots=True)
class Ends:
    """Finds what comes in and goes out of the slots."""

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
