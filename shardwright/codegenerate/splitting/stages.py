"""Partitions whose work is split over the slots of a mesh: a stage a slot.

Nodes are written on slots as building localizes them for a pipeline file, with collectives as nodes
that keep gradients right (`holdings`). The collectives of a partition's stages are the same, in one
order, so that no two slots wait for each other, forward or in autograd's backward, which goes
through nodes in the reverse of their order. A whole tensor, and a parameter that every slot has all
of, gets its whole gradient on every slot, where the loss is computed from whole outputs on every
slot alike. Where the batch is split along an axis ``data``, outputs that have it leave as slices:
the loss is then the sum of what the slots make of their slices.

A port that is a slice is called ``x[0:4, 0:64]``, of the program's ``x``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from shardwright.building.holdings import PlacedValue
from shardwright.building.localize import Ends
from shardwright.building.slots import SlotGraph
from shardwright.clusters import Cluster, Mesh
from shardwright.codegenerate.splitting.collectives import (
    ALONE,
    StageHoldings,
    StageWriter,
    end_layout,
    is_collective,
)
from shardwright.codegenerate.stages import (
    EndNames,
    Port,
    PortNames,
    Stage,
    StageProgram,
    partition_numbers,
)
from shardwright.errors import CodegenError
from shardwright.ir import Builder, IRGraph, IRNode
from shardwright.ir.inference import Inference
from shardwright.ir.operators import is_random
from shardwright.planning.plan import Assignment
from shardwright.sharding import Layout
from shardwright.sharding.ranges import Ranges, format_ranges, whole


def live_nodes(
    holdings: StageHoldings, mesh: Mesh, needed: Mapping[str, Collection[int]]
) -> dict[str, set[int]]:
    """The live nodes of each slot: a collective is live on all of its slots, or on none.

    Raises CodegenError where a slot has no use for what others need of a collective: its backward
    would not meet theirs.
    """
    graphs = {device: holdings.slots[device].builder.graph for device in mesh.devices}
    live: dict[str, set[int]] = {device: set() for device in mesh.devices}
    exchanges = [nodes for nodes in holdings.exchanges if live.keys() >= nodes.keys()]
    while True:
        before = sum(map(len, live.values()))
        for device, graph in graphs.items():
            live[device] = _walk(graph, needed[device], live[device])
        for nodes in exchanges:
            if any(node in live[device] for device, node in nodes.items()):
                for device, node in nodes.items():
                    live[device].add(node)
        if before == sum(map(len, live.values())):
            break
    _check_read(graphs, exchanges, live, needed)
    return live


def _walk(graph: IRGraph, needed: Collection[int], kept: Collection[int]) -> set[int]:
    """The nodes that some values and nodes depend on."""
    values, found = set(needed), set(kept)
    for node in reversed(graph.nodes):
        if node.id in found or not values.isdisjoint(node.outputs):
            found.add(node.id)
            values.update(node.inputs)
    return found


def _check_read(
    graphs: Mapping[str, IRGraph],
    exchanges: Sequence[Mapping[str, int]],
    live: Mapping[str, set[int]],
    needed: Mapping[str, Collection[int]],
) -> None:
    """Raise CodegenError where only some slots go on with what a collective gives all of them."""
    nodes = {device: graph.node_by_id() for device, graph in graphs.items()}
    for exchange in exchanges:
        members = [(device, nodes[device][node_id]) for device, node_id in exchange.items()]
        if members[0][1].op in ALONE or members[0][1].id not in live[members[0][0]]:
            continue
        unread = [
            device
            for device, node in members
            if not _is_read(graphs[device], node, live[device], needed[device])
        ]
        if unread:
            value = graphs[unread[0]].values[members[0][1].outputs[0]]
            raise CodegenError(
                f"slot {unread[0].partition(':')[2]} does nothing with {value.name!r}, which "
                f"others get by {members[0][1].op}; their gradients would wait for it: let the "
                "plan split what reads it otherwise"
            )


def _is_read(graph: IRGraph, node: IRNode, live: Collection[int], needed: Collection[int]) -> bool:
    made = graph.values[node.outputs[0]]
    return made.id in needed or any(user in live for user in made.users)


def draw_notes(stages: Sequence[Stage], *, training: bool) -> Iterator[str]:
    """What is to be known of random numbers that slots draw.

    Raises CodegenError where slots that train draw different amounts.
    """
    drawn = [
        [stage.graph.values[node.outputs[0]].shape for node in stage.graph.nodes if _draws(node)]
        for stage in stages
    ]
    if not any(drawn):
        return
    if len({tuple(map(math.prod, shapes)) for shapes in drawn}) > 1:
        if training:
            raise CodegenError(
                f"the slots of {stages[0].name} hold parts of different sizes of what dropout is "
                "done to, and would then draw different random numbers for what they all hold: "
                "plan for a number of slots that divides it, or capture the model in eval mode"
            )
        yield (
            f"{stages[0].name} is for evaluation: in training its slots would draw different "
            "amounts of random numbers, and no longer agree in what they all hold."
        )
    else:
        yield (
            f"The slots of {stages[0].name} draw random numbers in training. Seed all of them "
            "alike (torch.manual_seed), so that they agree in what they all hold; what they hold "
            "parts of gets the same mask on each slot."
        )


def _draws(node: IRNode) -> bool:
    return not is_collective(node) and is_random(node, in_training=True)


@dataclass(frozen=True, slots=True)
class SlotEnds:
    """What enters and leaves a slot: local values and ports' names, and new contents."""

    entering: Mapping[int, str]
    leaving: Mapping[str, int]
    updates: Mapping[int, int]

    @property
    def needed(self) -> set[int]:
        """The values that must be there at the end."""
        return {*self.leaving.values(), *self.updates.values()}


def slot_stage(
    name: str,
    slot: SlotGraph,
    ends: SlotEnds,
    live: Collection[int],
    shapes: Mapping[str, tuple[int, ...]],
) -> Stage:
    """One slot's live nodes as a stage; ``shapes`` are those of the model's tensors, by name."""
    graph = slot.builder.graph
    nodes = _fused(graph, [node for node in graph.nodes if node.id in live], ends.needed)
    outputs = sorted(ends.leaving.items())
    read = {value_id for node in nodes for value_id in node.inputs}
    read |= ends.needed
    inputs = sorted((port, local) for local, port in ends.entering.items() if local in read)
    builder, mapping = Builder(name), dict[int, int]()
    for _, local in inputs:
        mapping[local] = builder.copy_value(graph, graph.values[local]).id
    for value in graph.stored():
        if value.id in read:
            mapping[value.id] = builder.copy_value(graph, value).id
    for node in nodes:
        builder.copy_node(graph, node, mapping)
    made = builder.finish(
        [mapping[local] for _, local in outputs],
        updates={mapping[old]: mapping[new] for old, new in ends.updates.items() if old in mapping},
    )
    inputs_here, outputs_here = _ports(inputs, made.inputs), _ports(outputs, made.outputs)
    return Stage(name, made, inputs_here, outputs_here, slices=_named_apart(made, shapes))


def _fused(graph: IRGraph, nodes: Sequence[IRNode], needed: Collection[int]) -> list[IRNode]:
    """The nodes with each gather that parts alone read, and the copy for them, as one."""
    users = Counter(value_id for node in nodes for value_id in node.inputs)
    gathers = {node.outputs[0]: node for node in nodes if node.op == "all_gather"}
    found = []
    fused: set[int] = set()
    for node in nodes:
        gather = gathers.get(node.inputs[0]) if node.op == "copy_to_parts" else None
        alone = gather is not None and users[node.inputs[0]] == 1 and node.inputs[0] not in needed
        if gather is not None and alone and gather.attrs["axis"] == node.attrs["axis"]:
            fused.add(gather.id)
            op, attrs = "all_gather_for_parts", gather.attrs
            found.append(replace(node, op=op, inputs=gather.inputs, attrs=attrs))
        else:
            found.append(node)
    return [node for node in found if node.id not in fused]


def whole_shapes(graph: IRGraph) -> dict[str, tuple[int, ...]]:
    """The shapes of the model's tensors, by name, also of those that the plan has in parts."""
    found: dict[str, tuple[int, ...]] = {}
    for value in graph.stored():
        ends = tuple(end for _, end in value.placements or whole(value.shape))
        for name in value.names:
            found[name] = tuple(map(max, found.get(name, ends), ends))
    return found


def _named_apart(
    graph: IRGraph, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[str, Ranges, tuple[int, ...]]]:
    """Give slices names by which they stand in a stage; gives what they are slices of."""
    counts = Counter(value.names[0] for value in graph.stored())
    numbers: Counter[str] = Counter()
    found: dict[str, tuple[str, Ranges, tuple[int, ...]]] = {}
    for value in graph.stored():
        leading = value.names[0]
        suffix = f"_{numbers[leading]}" if counts[leading] > 1 else ""
        numbers[leading] += 1
        if value.placements is not None:
            origin = value.placements
            found |= {name + suffix: (name, origin, shapes[name]) for name in value.names}
            value.placements = None
        value.names = tuple(name + suffix for name in value.names)
    return found


def _ports(named: Sequence[tuple[str, int]], values: Sequence[int]) -> tuple[Port, ...]:
    pairs = zip(named, values, strict=True)
    return tuple(Port(name, value_id) for (name, _), value_id in pairs)


def check_ties(partitions: Sequence[Sequence[Stage]]) -> None:
    """Raise CodegenError where partitions would have Parameters of their own for one parameter."""
    known: dict[str, dict[tuple[Ranges, ...], str]] = {}
    for slots in partitions:
        for name, held in _parameters(slots):
            others = known.setdefault(name, {})
            for ranges, other in others.items():
                if other != slots[0].name and ranges != held and _overlap(ranges, held):
                    raise CodegenError(
                        f"{other} and {slots[0].name} are tied by the parameter {name!r}, of which "
                        f"their slots hold {_spans(ranges)} and {_spans(held)}: these would be "
                        "trained apart; let the plan give both the same mesh, or one stage"
                    )
            others.setdefault(held, slots[0].name)


def _parameters(slots: Sequence[Stage]) -> Iterator[tuple[str, tuple[Ranges, ...]]]:
    """The parameters of a partition: the model's name, and what each slot has of it."""
    for value in slots[0].graph.stored():
        path = value.names[0]
        if value.role == "param" and path in slots[0].slices:
            yield slots[0].slices[path][0], tuple(stage.slices[path][1] for stage in slots)
        elif value.role == "param":
            yield path, (whole(value.shape),) * len(slots)


def _overlap(some: Sequence[Ranges], others: Sequence[Ranges]) -> bool:
    """Whether any of these slices have elements in common."""
    return any(
        all(max(start, first) < min(end, last) for (start, end), (first, last) in pairs)
        for one in some
        for other in others
        for pairs in [list(zip(one, other, strict=True))]
    )


def _spans(slots: Sequence[Ranges]) -> str:
    return " ".join(map(format_ranges, slots))


def split_stages(
    graph: IRGraph,
    assigned: Sequence[Assignment],
    cluster: Cluster,
    *,
    stages: Sequence[int] = (),
    training: bool = False,
    notes: Sequence[str] = (),
) -> StageProgram:
    """The program of a graph whose nodes are assigned to these meshes.

    ``stages`` is the stage of each node, where they are numbered; else a partition is what one
    mesh does, or as much of it as can be done before it needs another's. Raises PlanError where a
    node cannot be split so, and CodegenError where gradients cannot go as it would be split.
    """
    numbers = list(stages) or partition_numbers(graph, [a.mesh for a in assigned])
    return _Splitting(graph, assigned, numbers, cluster).program(training, notes)


class _Splitting:
    """One graph, split; `program` gives it."""

    def __init__(
        self,
        graph: IRGraph,
        assigned: Sequence[Assignment],
        numbers: Sequence[int],
        cluster: Cluster,
    ) -> None:
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
        self.names = PortNames(graph, EndNames.of(graph))
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

    def program(self, training: bool, notes: Sequence[str]) -> StageProgram:
        """The stages, with names for what enters and leaves them."""
        graph, names = self.graph, self.names.found
        partitions = tuple(
            tuple(self._stages(place, mesh))
            for place, (_, mesh) in enumerate(sorted(self.meshes.items()))
        )
        check_ties(partitions)
        drawn = [note for slots in partitions for note in draw_notes(slots, training=training)]
        return StageProgram(
            name=graph.name,
            partitions=partitions,
            inputs=tuple(names[value_id] for value_id in graph.inputs),
            outputs=tuple(names[value_id] for value_id in graph.outputs),
            training=training,
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
