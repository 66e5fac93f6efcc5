"""Slots of a training step, written by hand item by item."""

from shardwright.building.slots import (
    BORDER,
    GroupMember,
    LocalCommunication,
    Localized,
    LocalSlice,
    PhaseStage,
    SlotGraph,
)
from shardwright.ir.inference import Inference

F0, F1 = PhaseStage("forward", 0), PhaseStage("forward", 1)
B0, B1 = PhaseStage("backward", 0), PhaseStage("backward", 1)
UPDATE = PhaseStage("update")


class Slots:
    """Slots and communications written one after another."""

    def __init__(self, count):
        inference = Inference()
        self.slots = {f"d{i}": SlotGraph.empty(f"d{i}", inference) for i in range(count)}
        self.communications = []
        self.updates = []
        self.outputs = []

    def input(self, device, name="x"):
        return self.slots[device].builder.input(name, (4, 4))

    def stored(self, device, name):
        graph = self.slots[device].builder.graph
        return graph.new_value(name, (4, 4), "f32", role="param", names=(name,))

    def call(self, device, place, op, *values):
        self.slots[device].go(place)
        return self.slots[device].builder.call(f"aten.{op}", *values)

    def border(self, device, place):
        self.slots[device].go(place)
        self.slots[device].add(BORDER)

    def send(self, value, source, source_place, target, target_place):
        got = self.slots[target].builder.input("got", value.shape)
        members = (GroupMember(source, value.id, None), GroupMember(target, None, got.id))
        self.communications.append(LocalCommunication("send", {}, members))
        for device, place in ((source, source_place), (target, target_place)):
            self.slots[device].go(place)
            self.slots[device].add(self.communications[-1])
        return got

    def update(self, device, old, new):
        self.updates.append((part(device, old), part(device, new)))

    def localized(self):
        for slot in self.slots.values():
            slot.note()
        return Localized(self.slots, self.communications, {}, self.outputs, self.updates)


def part(device, value):
    return LocalSlice(device, value.id, tuple((0, size) for size in value.shape))
