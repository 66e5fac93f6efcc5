"""Partitions whose work is split over the slots of a mesh: a stage a slot.

Comes in: a graph, and the assignment of each of its nodes to slots. Goes out: a Program in which a
partition has one stage a slot of its mesh. Nodes are written on slots as `localize` does for a
pipeline file, with collectives as nodes (`split_holdings`) that keep gradients right
(`split_nodes`).

What always holds: the collectives of a partition's stages are the same, in one order, so that no
two slots wait for each other, forward or in autograd's backward, which goes through nodes in the
reverse of their order. A whole tensor, and a parameter that every slot has all of, gets its whole
gradient on every slot, where the loss is computed from whole outputs on every slot alike. Where
the batch is split along an axis ``data``, outputs that have it leave as slices: the loss is then
the sum of what the slots make of their slices.

A port that is a slice is called ``x[0:4, 0:64]``, of the program's ``x``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec

from shardwright.building.holdings import PlacedValue
from shardwright.building.localize import Ends
from shardwright.building.slots import SlotGraph
from shardwright.clusters import Cluster, Mesh
from shardwright.codegenerate.sources.numbering import partition_numbers
from shardwright.codegenerate.sources.port_names import PortNames
from shardwright.codegenerate.splitting.live_nodes import live_nodes
from shardwright.codegenerate.splitting.random_draws import draw_notes
from shardwright.codegenerate.splitting.slot_stage import SlotEnds, slot_stage, whole_shapes
from shardwright.codegenerate.splitting.split_holdings import StageHoldings, end_layout
from shardwright.codegenerate.splitting.split_nodes import StageWriter
from shardwright.codegenerate.splitting.ties import check_ties
from shardwright.codegenerate.stage import Program, Stage
from shardwright.ir import IRGraph
from shardwright.ir.inference import Inference
from shardwright.ir.structure import leaves
from shardwright.planning.plan import Assignment
from shardwright.sharding import Layout
from shardwright.sharding.ranges import format_ranges, whole


def split_stages(
    graph: IRGraph,
    assigned: Sequence[Assignment],
    cluster: Cluster,
    *,
    stages: Sequence[int] = (),
    training: bool = False,
    notes: Sequence[str] = (),
    loss: int | None = None,
) -> Program:
    """The program of a graph whose nodes are assigned to these meshes.

    ``stages`` is the stage of each node, where they are numbered; else a partition is what one
    mesh does, or as much of it as can be done before it needs another's. ``loss`` is the output
    that a training step differentiates. Raises PlanError where a node cannot be split so, and
    CodegenError where gradients cannot go as it would be split.
    """
    numbers = list(stages) or partition_numbers(graph, [a.mesh for a in assigned])
    return _Splitting(graph, assigned, numbers, cluster).program(training, tuple(notes), loss)


class _Splitting:
    """One graph, split; `program` gives it."""

    def __init__(
        self,
        graph: IRGraph,
        assigned: Sequence[Assignment],
        numbers: Sequence[int],
        cluster: Cluster,
    ) -> None:
        assert graph.in_structure is not None
        self.graph = graph
        self.meshes = _meshes(assigned, numbers)
        inference = Inference()
        devices = [device for mesh in self.meshes.values() for device in mesh.devices]
        slots = {device: SlotGraph.empty(device, inference) for device in devices}
        self.holdings = StageHoldings(graph, slots, _renamed(cluster, self.meshes))
        self._write(assigned, numbers)
        self.leaving = {value_id: self._output(value_id) for value_id in _made(graph)}
        self.leaving |= self.holdings.leaving
        self.updates = Ends(graph, self.holdings).updates()
        self.names = PortNames(graph, [leaf.name for leaf in leaves(graph.in_structure)])
        self.names.add(set(self.leaving))
        self.shapes = whole_shapes(graph)

    def _write(self, assigned: Sequence[Assignment], numbers: Sequence[int]) -> None:
        """Write the nodes, partition after partition."""
        writer = StageWriter(self.graph, self.holdings.slots, self.holdings)
        for at in sorted(range(len(numbers)), key=numbers.__getitem__):
            mesh, splits = self.meshes[numbers[at]], assigned[at].splits
            alike = assigned[at].mesh.sizes == mesh.sizes
            writer.add(
                self.graph.nodes[at], Assignment(mesh, splits if alike else (None,) * mesh.ndim)
            )

    def _output(self, value_id: int) -> PlacedValue:
        """An output of the graph as it leaves the partition that makes it."""
        holdings = self.holdings
        held = holdings.held.get(value_id, ())
        if not held:
            last = self.meshes[max(self.meshes)]
            return holdings.fetch(value_id, last, Layout.replicated(last))
        mesh = held[0].mesh
        wanted = end_layout(held[0].layout, mesh)
        return holdings.leave(self.graph.values[value_id], held[0], mesh, wanted)

    def program(self, training: bool, notes: tuple[str, ...], loss: int | None) -> Program:
        """The stages, with names for what enters and leaves them."""
        graph, names = self.graph, self.names.found
        partitions = tuple(
            tuple(self._stages(place, mesh))
            for place, (_, mesh) in enumerate(sorted(self.meshes.items()))
        )
        check_ties(partitions)
        drawn = [note for slots in partitions for note in draw_notes(slots, training=training)]
        return Program(
            name=graph.name,
            partitions=partitions,
            inputs=tuple(names[value_id] for value_id in graph.inputs),
            outputs=tuple(names[value_id] for value_id in graph.outputs),
            in_structure=graph.in_structure,
            out_structure=graph.out_structure,
            training=training,
            loss=None if loss is None else names[loss],
            notes=(*notes, *drawn),
        )

    def _stages(self, number: int, mesh: Mesh) -> Iterator[Stage]:
        """The stages of a partition."""
        ends = {device: self._ends(device) for device in mesh.devices}
        live = live_nodes(self.holdings, mesh, {device: end.needed for device, end in ends.items()})
        for index, device in enumerate(mesh.devices):
            slot = self.holdings.slots[device]
            stage = slot_stage(f"Stage{number}", slot, ends[device], live[device], self.shapes)
            yield replace(stage, index=index, mesh=mesh)

    def _ends(self, device: str) -> SlotEnds:
        """What enters and leaves a slot, by the names of ports."""
        entering: dict[int, str] = {}
        leaving: dict[str, int] = {}
        for value_id, held in self.holdings.held.items():
            for holding in held:
                local = holding.local.get(device)
                if local is not None and self.holdings.slots[device].value(local).role == "input":
                    entering[local] = self._name(value_id, holding, device)
        for value_id, holding in self.leaving.items():
            if device in holding.local:
                leaving[self._name(value_id, holding, device)] = holding.local[device]
        updates = {old.value: new.value for old, new in self.updates if old.device == device}
        return SlotEnds(entering, leaving, updates)

    def _name(self, value_id: int, holding: PlacedValue, device: str) -> str:
        """A port's name: of a slice with its ranges."""
        shape = self.graph.values[value_id].shape
        at = holding.mesh.devices.index(device)
        ranges = holding.layout.slices(holding.mesh, shape)[at]
        name = self.names.found[value_id]
        return name if ranges == whole(shape) else f"{name}{format_ranges(ranges)}"


def _made(graph: IRGraph) -> Iterator[int]:
    """The outputs that a stage gives: inputs are the caller's own."""
    return (v for v in dict.fromkeys(graph.outputs) if graph.values[v].role != "input")


# --- meshes ---------------------------------------------------------------------------------------


def _meshes(assigned: Sequence[Assignment], numbers: Sequence[int]) -> dict[int, Mesh]:
    """The mesh of each partition, of slots that no other has."""
    found: dict[int, dict[Mesh, int]] = {}
    for assignment, number in zip(assigned, numbers, strict=True):
        counts = found.setdefault(number, {})
        counts[assignment.mesh] = counts.get(assignment.mesh, 0) + 1
    largest = {number: max(counts, key=counts.__getitem__) for number, counts in found.items()}
    return {
        number: msgspec.structs.replace(
            mesh, devices=tuple(_device(number, device) for device in mesh.devices)
        )
        for number, mesh in sorted(largest.items())
    }


def _device(number: int, device: str) -> str:
    """A slot's name for what it does of one partition."""
    return f"{number}:{device}"


def _renamed(cluster: Cluster, meshes: Mapping[int, Mesh]) -> Cluster:
    """The machines, with slots as partitions call them."""
    hosts = tuple(
        tuple(_device(number, device) for number in meshes for device in host)
        for host in cluster.hosts
    )
    return msgspec.structs.replace(cluster, hosts=hosts)
