"""What one slot does of a partition, as a stage.

Comes in: a slot's graph, its live nodes, and what enters and leaves it. Goes out: a `Stage`. What
always holds: ports are in the order of their names; slices of one tensor have names of their own in
the stage, by which it says what they are slices of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.building.slots import SlotGraph
from shardwright.codegenerate.stage import Port, Stage
from shardwright.ir import Builder, IRGraph, IRNode
from shardwright.sharding.ranges import Ranges, whole


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
