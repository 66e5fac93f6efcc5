"""Partitions on the slots of their meshes: a stage a slot, one where nothing is split.

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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from shardwright.building.holdings import PlacedValue
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
    Numbers,
    Port,
    Stage,
    StageProgram,
    check_order,
    live,
    partition_numbers,
    port_names,
    together,
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
    """What enters and leaves a slot: local values and ports' names, and new contents.

    ``stored`` are its stored values, in the model's order.
    """

    entering: Mapping[int, str]
    leaving: Mapping[str, int]
    updates: Mapping[int, int]
    stored: Sequence[int]

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
    read |= {*ends.needed, *ends.updates}
    inputs = sorted((port, local) for local, port in ends.entering.items() if local in read)
    builder, mapping = Builder(name), dict[int, int]()
    for _, local in inputs:
        mapping[local] = builder.copy_value(graph, graph.values[local]).id
    for local in ends.stored:
        if local in read:
            mapping[local] = builder.copy_value(graph, graph.values[local]).id
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
        gather = gathers.get(node.inputs[0]) if node.op == "all_reduce_gradient" else None
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
    counts = Counter(value.names for value in graph.stored())
    numbers: Counter[tuple[str, ...]] = Counter()
    found: dict[str, tuple[str, Ranges, tuple[int, ...]]] = {}
    for value in graph.stored():
        names = value.names
        suffix = f"_{numbers[names]}" if counts[names] > 1 else ""
        numbers[names] += 1
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


def cut(
    graph: IRGraph,
    numbers: Sequence[int],
    *,
    training: bool,
    notes: Sequence[str] = (),
    ends: EndNames | None = None,
) -> StageProgram:
    """The program of a graph whose nodes are of these partitions, each of one slot.

    Raises CodegenError where a partition needs what a later one makes.
    """
    assigned = [Assignment.on("d0")] * len(graph.nodes)
    return split_stages(
        graph, assigned, Cluster.of(1), stages=numbers, training=training, notes=notes, ends=ends
    )


def split_stages(
    graph: IRGraph,
    assigned: Sequence[Assignment],
    cluster: Cluster,
    *,
    stages: Sequence[int] = (),
    training: bool = False,
    notes: Sequence[str] = (),
    ends: EndNames | None = None,
) -> StageProgram:
    """The program of a graph whose nodes are assigned to these meshes.

    ``stages`` is the stage of each node, where they are numbered; else a partition is what one
    mesh does, or as much of it as can be done before it needs another's. ``ends`` are the graph's
    own names where not given. Raises PlanError where a node cannot be split so, and CodegenError
    where gradients cannot go as it would be split, or where a partition needs what a later one
    makes.
    """
    numbers = list(stages) or partition_numbers(graph, [a.mesh for a in assigned])
    partitioned = _Partitioned(graph, assigned, numbers, cluster, ends or EndNames.of(graph))
    return partitioned.program(training, notes)


class _Partitioned:
    """One graph on the slots of its partitions; `program` gives it."""

    def __init__(
        self,
        graph: IRGraph,
        assigned: Sequence[Assignment],
        numbers: Sequence[int],
        cluster: Cluster,
        ends: EndNames,
    ) -> None:
        self.graph = graph
        placed = live(graph, numbers)
        together(graph, placed)
        check_order(graph, placed)
        by_node = {node.id: own for node, own in zip(graph.nodes, assigned, strict=True)}
        self.meshes = _meshes([(n, by_node[node_id].mesh) for node_id, n in placed.items()])
        self.is_split = any(mesh.devices[1:] for mesh in self.meshes.values())
        inference = Inference()
        devices = [device for mesh in self.meshes.values() for device in mesh.devices]
        slots = {device: SlotGraph.empty(device, inference) for device in devices}
        self.holdings = StageHoldings(graph, slots, _renamed(cluster, self.meshes))
        self._write(placed, by_node)
        self.updates = dict(self._updates())  # before outputs: one that changes is where it changes
        self.leaving = {value_id: self._output(value_id) for value_id in _made(graph)}
        self.leaving |= self.holdings.leaving
        self.names = port_names(graph, ends, set(self.leaving))
        self.shapes = whole_shapes(graph)

    def _write(self, numbers: Numbers, assigned: Mapping[int, Assignment]) -> None:
        """Write the nodes, partition after partition."""
        writer = StageWriter(self.graph, self.holdings.slots, self.holdings)
        nodes = self.graph.node_by_id()
        for node_id in sorted(numbers, key=numbers.__getitem__):
            mesh, own = self.meshes[numbers[node_id]], assigned[node_id]
            splits = own.splits if own.mesh.sizes == mesh.sizes else (None,) * mesh.ndim
            writer.add(nodes[node_id], Assignment(mesh, splits))

    def _output(self, value_id: int) -> PlacedValue:
        """An output of the graph as it leaves the partition that makes it."""
        holdings = self.holdings
        held = holdings.held.get(value_id) or [self._loaded(value_id)]
        wanted = end_layout(held[0].layout, held[0].mesh)
        return holdings.leave(self.graph.values[value_id], held[0], held[0].mesh, wanted)

    def _loaded(self, value_id: int, like: int | None = None) -> PlacedValue:
        """A stored value that no node reads: where another value is, or in the first partition."""
        held = self.holdings.held.get(value_id if like is None else like)
        mesh = held[0].mesh if held else next(iter(self.meshes.values()))
        return self.holdings.fetch(value_id, mesh, Layout.replicated(mesh))

    def _updates(self) -> Iterator[tuple[tuple[str, int], int]]:
        """The new contents of each slot's stored values that change."""
        for old, new in self.graph.updates.items():
            if old not in self.holdings.held:
                self._loaded(old, new)
            mesh = self.holdings.held[old][0].mesh
            for held in [one for one in self.holdings.held[old] if one.mesh == mesh]:
                made = self.holdings.fetch(new, mesh, held.layout)
                for device, local in held.local.items():
                    if self.holdings.slots[device].value(local).is_stored:
                        yield (device, local), made.local[device]

    def program(self, training: bool, notes: Sequence[str]) -> StageProgram:
        """The stages, with names for what enters and leaves them."""
        graph, names = self.graph, self.names
        partitions = tuple(
            tuple(self._stages(place, mesh)) for place, mesh in enumerate(self.meshes.values())
        )
        check_ties(partitions)
        drawn = (
            [note for slots in partitions for note in draw_notes(slots, training=training)]
            if self.is_split
            else []
        )
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
            yield replace(stage, index=index, mesh=mesh) if self.is_split else stage

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
        updates = {old: new for (own, old), new in self.updates.items() if own == device}
        loaded = sorted(
            (value_id, local)
            for (value_id, own, _), local in self.holdings.loaded.items()
            if own == device and self.graph.values[value_id].is_stored
        )
        return SlotEnds(entering, leaving, updates, [local for _, local in loaded])

    def _name(self, value_id: int, holding: PlacedValue, device: str) -> str:
        """A port's name: of a slice with its ranges."""
        shape = self.graph.values[value_id].shape
        at = holding.mesh.devices.index(device)
        ranges = holding.layout.slices(holding.mesh, shape)[at]
        name = self.names[value_id]
        return name if ranges == whole(shape) else f"{name}{format_ranges(ranges)}"


def _made(graph: IRGraph) -> Iterator[int]:
    """The outputs that a stage gives: inputs are the caller's own."""
    return (v for v in dict.fromkeys(graph.outputs) if graph.values[v].role != "input")


# --- meshes ---------------------------------------------------------------------------------------


def _meshes(placed: Iterable[tuple[int, Mesh]]) -> dict[int, Mesh]:
    """The mesh of each partition, in order, of slots that no other has."""
    found: dict[int, Counter[Mesh]] = {}
    for number, mesh in placed:
        found.setdefault(number, Counter())[mesh] += 1
    largest = {number: counts.most_common(1)[0][0] for number, counts in found.items()}
    largest = largest or {0: Assignment.on("d0").mesh}
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
