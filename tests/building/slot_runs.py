"""Localized steps run slot by slot with plain torch, without tasks, files or workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from shardwright.building.slots import Border, LocalCommunication, Localized
from shardwright.comm.rounds import combine
from shardwright.comm.transport import Operation, TensorSpec
from shardwright.comm.wire import conform
from shardwright.ir import IRNode
from shardwright.ir.operators import flatten_results, join_call, resolve
from shardwright.ir.tensor_meta import contiguous_strides, torch_dtype

EACH = {"forward", "backward"}
CPU = torch.device("cpu")


class SlotRun:
    """The contents of every slot's values, between and within steps."""

    def __init__(self, localized: Localized) -> None:
        self.localized = localized
        self.held: dict[str, dict[int, Tensor]] = {device: {} for device in localized.slots}
        self.phases = dict(self._made())
        """When a value is made, by slot and value."""

    def _made(self) -> Iterator[tuple[tuple[str, int | None], str]]:
        for device, slot in self.localized.slots.items():
            for item, place in zip(slot.items, slot.places, strict=True):
                if isinstance(item, IRNode):
                    yield from (((device, value), place.phase) for value in item.outputs)
                elif isinstance(item, LocalCommunication):
                    here = [member for member in item.members if member.device == device]
                    yield from (((device, member.gets), place.phase) for member in here)

    def load(self, contents: Mapping[str, Tensor]) -> None:
        """Give each slot its slices of stored values, by their leading names."""
        for device, slot in self.localized.slots.items():
            for value in slot.builder.graph.stored():
                if value.init is not None:
                    tensor = torch.zeros(value.shape, dtype=torch_dtype(value.dtype))
                else:
                    tensor = contents[value.names[0]]
                    for dim, (start, end) in enumerate(value.placements or ()):
                        tensor = tensor.narrow(dim, start, end - start)
                self.held[device][value.id] = tensor.clone()

    def step(self, microbatches: Sequence[Mapping[int, Tensor]], whole=()) -> None:
        """Run a step: inputs of each microbatch, and of the whole batch, by value of the graph."""
        self._empty_accumulators()
        self._give(dict(whole))
        self._run({"prepare"})
        for microbatch in microbatches:
            self._give(microbatch)
            self._run(EACH)
            self._replace(EACH)
        self._run({"update"})
        self._replace({"update"})

    def value(self, part) -> Tensor:
        return self.held[part.device][part.value]

    def _empty_accumulators(self) -> None:
        for old, new in self.localized.updates:
            value = self.localized.slots[old.device].value(old.value)
            if value.init is not None and self.phase(new) in EACH:
                self.held[old.device][old.value].zero_()

    def _give(self, inputs: Mapping[int, Tensor]) -> None:
        for value_id, tensor in inputs.items():
            for part in self.localized.inputs.get(value_id, ()):
                ranges = tuple(slice(start, end) for start, end in part.ranges)
                self.held[part.device][part.value] = tensor[ranges]

    def _run(self, phases: set[str]) -> None:
        queues = {
            device: [
                item
                for item, place in zip(slot.items, slot.places, strict=True)
                if place.phase in phases and not isinstance(item, Border)
            ]
            for device, slot in self.localized.slots.items()
        }
        while any(queues.values()):
            for device, queue in queues.items():
                while queue and isinstance(queue[0], IRNode):
                    self._node(device, queue.pop(0))
            if not any(queues.values()):
                return
            ready = next(
                c
                for c in self.localized.communications
                if all(queues[m.device] and queues[m.device][0] is c for m in c.members)
            )
            self._communicate(ready)
            for member in ready.members:
                queues[member.device].pop(0)

    def _node(self, device: str, node: IRNode) -> None:
        graph = self.localized.slots[device].builder.graph
        held = self.held[device]
        overload = resolve(node.op)
        args, kwargs = join_call(overload, [held[v] for v in node.inputs], node.attrs, CPU)
        made = flatten_results(overload(*args, **kwargs))
        for value_id, tensor in zip(node.results, made, strict=True):
            if value_id is None:
                continue
            value = graph.values[value_id]
            found = (tuple(tensor.shape), tensor.dtype)
            assert found == (value.shape, torch_dtype(value.dtype)), (node, found)
            strides = value.strides or contiguous_strides(value.shape)
            for size, got, told in zip(value.shape, tensor.stride(), strides, strict=True):
                assert size == 1 or got == told or not tensor.numel(), (node, strides)
            held[value_id] = tensor

    def _communicate(self, communication: LocalCommunication) -> None:
        members = communication.members
        given = [None if m.gives is None else self.held[m.device][m.gives] for m in members]
        if communication.kind == "send":
            receiver = members[1]
            spec = self._spec(receiver.device, receiver.gets)
            self.held[receiver.device][receiver.gets] = conform(given[0], spec)
            return
        metadata = communication.metadata
        specs = [self._spec(m.device, m.gives) for m in members]
        outs = [self._spec(m.device, m.gets) for m in members]
        operation = Operation(
            communication.kind,
            "g",
            0,
            tuple(range(len(members))),
            tuple(m.device for m in members),
            tuple(specs),
            tuple(outs),
            metadata,
        )
        for member, tensor in zip(members, combine(operation, given), strict=True):
            if member.gets is not None:
                self.held[member.device][member.gets] = conform(
                    tensor, self._spec(member.device, member.gets)
                )

    def _spec(self, device: str, value_id: int | None) -> TensorSpec | None:
        if value_id is None:
            return None
        value = self.localized.slots[device].value(value_id)
        return TensorSpec(value.shape, torch_dtype(value.dtype), value.strides)

    def _replace(self, phases: set[str]) -> None:
        for old, new in self.localized.updates:
            if self.phase(new) in phases:
                self.held[old.device][old.value] = self.value(new).clone()

    def phase(self, part) -> str:
        """When a part is made."""
        return self.phases[part.device, part.value]
