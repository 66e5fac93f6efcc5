"""A plan put together from the assignment of each node, and back to the step that it is of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shardwright.clusters import Mesh
from shardwright.ir import IRGraph, IRNode
from shardwright.ir.repeats import fingerprint
from shardwright.ops.bound import Flow
from shardwright.ops.catalog import dimop_of
from shardwright.planning.pipeline import node_work
from shardwright.planning.plan import (
    Assignment,
    Plan,
    SlotLoad,
    Split,
    fingerprint_graph,
    input_texts,
    label_of,
)
from shardwright.planning.rules import DATA
from shardwright.planning.step import PreparedStep, as_step
from shardwright.planning.unfuse import unfuse


def make_plan(
    graph: IRGraph,
    policy: str,
    devices: Sequence[str],
    assigned: Sequence[Assignment],
    notes: Sequence[str] = (),
    *,
    work: Sequence[int] | None = None,
    fingerprint: str | None = None,
) -> Plan:
    """The plan in which each node has the assignment at its place.

    ``work`` is that of each node, its forward's by default. ``fingerprint`` is that of the graph
    that the plan is for, where that is another.
    """
    numbers: dict[Assignment, int] = {}
    nodes = tuple(numbers.setdefault(assignment, len(numbers)) for assignment in assigned)
    loads = slot_loads(graph, devices, assigned, work)
    return Plan(
        graph.name,
        fingerprint or fingerprint_graph(graph),
        policy,
        tuple(devices),
        tuple(numbers),
        nodes,
        loads,
        tuple(notes),
        inputs=input_texts(graph),
        labels=tuple(map(label_of, graph.nodes)),
    )


def planned(graph: IRGraph, plan: Plan) -> IRGraph:
    """The graph whose nodes a model's plan assigns."""
    return unfuse(graph, plan.unfused)


def step_of(graph: IRGraph, plan: Plan) -> PreparedStep:
    """The step whose forward nodes a plan assigns."""
    assert plan.training is not None
    return as_step(unfuse(graph, plan.unfused), plan.training.microbatches, shards_of(plan))


def shards_of(plan: Plan) -> int:
    """In how many shards of the batch the slots of a plan's stages are, at the most."""
    meshes = (assignment.mesh for assignment in plan.assignments)
    return max(dict(zip(mesh.axes, mesh.sizes, strict=True)).get(DATA, 1) for mesh in meshes)


# --- loads ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _SlotSum:
    nodes: int = 0
    work: float = 0
    stored: dict[tuple[int, int], int] = field(default_factory=dict)
    """Bytes by stored value and number of its parts."""
    received: dict[int, int] = field(default_factory=dict)
    """Bytes by value."""


def slot_loads(
    graph: IRGraph,
    devices: Sequence[str],
    assigned: Sequence[Assignment],
    work: Sequence[int] | None = None,
) -> tuple[SlotLoad, ...]:
    """The load of each slot; what is split counts by its even share.

    ``work`` is that of each node, its forward's by default.
    """
    work = [node_work(graph, node) for node in graph.nodes] if work is None else work
    every = dict.fromkeys(found.mesh for found in assigned)
    first = _alike(devices, every)
    slots = {device: _SlotSum() for device in dict.fromkeys(first.values())}
    meshes = {mesh: [device for device in mesh.devices if device in slots] for mesh in every}
    flows = _Flows(graph)
    homes: dict[int, Sequence[str]] = {}
    for node, assignment, whole in zip(graph.nodes, assigned, work, strict=True):
        parts = flows.parts(node, assignment)
        share = whole / _size(assignment)
        for device in meshes[assignment.mesh]:
            slot = slots[device]
            slot.nodes += 1
            slot.work += share
            for value_id, count in zip(node.inputs, parts, strict=True):
                value = graph.values[value_id]
                if value.is_stored:
                    slot.stored[value_id, count] = value.nbytes // count
                elif value.producer is not None and device not in homes[value_id]:
                    slot.received[value_id] = value.nbytes // count
        homes |= dict.fromkeys(node.outputs, meshes[assignment.mesh])
    return tuple(
        SlotLoad(
            device,
            slot.nodes,
            round(slot.work),
            sum(slot.stored.values()),
            sum(slot.received.values()),
        )
        for device, slot in ((device, slots[first[device]]) for device in devices)
    )


def _alike(devices: Sequence[str], meshes: Iterable[Mesh]) -> dict[str, str]:
    """For each slot the first that is in the same meshes: they carry the same."""
    found: dict[str, list[int]] = {device: [] for device in devices}
    for number, mesh in enumerate(meshes):
        for device in mesh.devices:
            found[device].append(number)
    first: dict[tuple[int, ...], str] = {}
    return {device: first.setdefault(tuple(found[device]), device) for device in devices}


def _size(assignment: Assignment) -> int:
    """In how many parts the node is split."""
    pairs = zip(assignment.mesh.sizes, assignment.splits, strict=True)
    return math.prod(size for size, split in pairs if isinstance(split, Split))


@dataclass(slots=True)
class _Flows:
    """How many parts each input of a node is in, worked out once for equal nodes."""

    graph: IRGraph
    known: dict[object, tuple[int, ...]] = field(default_factory=dict)

    def parts(self, node: IRNode, assignment: Assignment) -> tuple[int, ...]:
        if _size(assignment) == 1:
            return (1,) * len(node.inputs)
        key = (fingerprint(self.graph, node), assignment)
        if key not in self.known:
            self.known[key] = self._work_out(node, assignment)
        return self.known[key]

    def _work_out(self, node: IRNode, assignment: Assignment) -> tuple[int, ...]:
        bound = dimop_of(self.graph, node)
        assert bound is not None
        counts = [1] * len(node.inputs)
        for size, split in zip(assignment.mesh.sizes, assignment.splits, strict=True):
            if isinstance(split, Split):
                flow: Flow = bound.flow(split.identifier)
                for i, carry in enumerate(flow.inputs):
                    counts[i] *= size if carry.kind == "shard" else 1
        return tuple(counts)
