"""A model as its layers: what seed 001 calls the graph, and puts in stages.

Input: a graph, and how far down its tree of modules to go. Output: a `LayerGraph`, whose nodes are
layers: calls of modules that are put in a stage whole, and single operators between them.
Invariant: layers stand in the order of the graph, its forward nodes are all in one of them each,
and the nodes of a layer stand next to one another; so layers need one another in one direction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwright.costs import Costs, Layer
from shardwright.costs.granularity import BasicBlocks, units
from shardwright.errors import PlanError
from shardwright.ir import IRGraph, IRValue
from shardwright.planning.metis import (
    check_options,
    policy_nodes,
    weigh_edges,
    weigh_nodes,
    weighed_stages,
)
from shardwright.planning.partition import Partition, make_partition, task_of
from shardwright.planning.policy import PolicyNode
from shardwright.planning.step_graph import forward_view
from shardwright.planning.workload import SentValue, Workload


@dataclass(frozen=True, slots=True, eq=False)
class LayerNode:
    """A layer, as functions that weigh it see it.

    number
        Its place in the order of layers.
    name, kind
        The module's path and class; of a single operator the name of what it makes, and its own.
    nodes
        What it does, in the order of the graph.
    weight
        What it takes, as it was measured: `forward_time`, `backward_time`, `layer_size` and so on;
        None where nothing was measured.
    """

    number: int
    name: str
    kind: str
    nodes: tuple[PolicyNode, ...] = field(repr=False)
    weight: Layer | None = None

    def __str__(self) -> str:
        return f"layer {self.number} ({self.name}: {self.kind})"

    @property
    def scope(self) -> str:
        """`name`, under the seed's name."""
        return self.name

    @property
    def inputs(self) -> tuple[IRValue, ...]:
        """What it reads that is neither stored nor made in it, each once."""
        made = {value.id for node in self.nodes for value in node.outputs}
        return tuple(
            value for value in self._read() if value.id not in made and not value.is_stored
        )

    @property
    def outputs(self) -> tuple[IRValue, ...]:
        """What it makes that others read or that the graph gives."""
        inside = {node.node.id for node in self.nodes}
        graph = self.nodes[0].graph
        given = {*graph.outputs, *graph.updates.values()}
        made = (value for node in self.nodes for value in node.outputs)
        return tuple(v for v in made if v.id in given or not inside.issuperset(v.users))

    @property
    def stored(self) -> tuple[IRValue, ...]:
        """The parameters, buffers and constants that it reads, each once."""
        return tuple(value for value in self._read() if value.is_stored)

    def _read(self) -> Iterable[IRValue]:
        return {value.id: value for node in self.nodes for value in node.inputs}.values()


@dataclass(frozen=True, slots=True, eq=False)
class LayerGraph:
    """A model's graph by its layers, and in stages where it was partitioned.

    graph
        The graph itself.
    nodes
        Its layers.
    costs
        What its operators take, where that was measured.
    partition
        In which stage each operator is; None before it was partitioned.
    """

    graph: IRGraph
    nodes: tuple[LayerNode, ...]
    costs: Costs | None = None
    partition: Partition | None = None

    def __str__(self) -> str:
        if self.partition is not None:
            return str(self.partition)
        lines = [f"graph of {self.graph.name}: {len(self.nodes)} layers"]
        return "\n".join([*lines, *(f"  {node.name}: {node.kind}" for node in self.nodes)])

    @property
    def stages(self) -> tuple[int, ...]:
        """The stage of each layer; none before it was partitioned."""
        if self.partition is None:
            return ()
        return tuple(self.partition.stages[node.nodes[0].number] for node in self.nodes)


def layer_graph(
    graph: IRGraph,
    *,
    depth: int | None = None,
    basic_blocks: BasicBlocks = (),
    weights: Iterable[Layer] = (),
    costs: Costs | None = None,
) -> LayerGraph:
    """The layers of a graph, ``depth`` modules down (`costs.granularity.units`).

    ``basic_blocks`` are classes of modules, or their names, that are one layer wherever they stand.
    A layer has the weight that was measured of its nodes, or of a layer of its name. Raises
    ProfileError for what is no depth, and for a class that no node is in a module of.
    """
    view = forward_view(graph)
    nodes = {node.node.id: node for node in policy_nodes(view)}
    weights = list(weights)
    by_name = {weight.name: weight for weight in weights}
    by_nodes = {(weight.name, weight.nodes): weight for weight in weights}
    layers = []
    for number, unit in enumerate(units(view, view.nodes, depth=depth, basic_blocks=basic_blocks)):
        ids = tuple(node.id for node in unit.nodes)
        weight = by_nodes.get((unit.name, ids), by_name.get(unit.name))
        inside = tuple(nodes[node_id] for node_id in ids)
        layers.append(LayerNode(number, unit.name, unit.kind, inside, weight))
    return LayerGraph(graph, tuple(layers), costs)


# --- METIS over layers ----------------------------------------------------------------------------
#
# The nodes of a layer are in one stage.


LayerWeight = Callable[[LayerNode], float]
LayerEdgeWeight = Callable[[LayerNode, LayerNode], float]


def partition_layers(
    layers: LayerGraph,
    num_partitions: int,
    node_weight_function: LayerWeight | None = None,
    edge_weight_function: LayerEdgeWeight | None = None,
    options: Mapping[str, int] | None = None,
) -> LayerGraph:
    """The layers in stages of equal weight, by METIS.

    Weights are 1 by default; ``options`` are METIS's. Raises PlanError for a weight that is
    negative or no number, for an option that METIS has not, and for more parts than layers.
    """
    options = options or {}
    check_options(options)
    task = task_of(layers.graph, num_partitions, costs=layers.costs)
    if num_partitions > len(layers.nodes):
        raise PlanError(
            f"{num_partitions} parts, but the graph {layers.graph.name!r} has only "
            f"{len(layers.nodes)} layers; go further down its modules with max_depth (depth), or "
            "name fewer basic_blocks"
        )
    groups = [node.number for node in layers.nodes for _ in node.nodes]
    workload = grouped(task.workload, groups, [str(node) for node in layers.nodes])
    weights = weigh_nodes(layers.nodes, node_weight_function)
    edges = weigh_edges(layers.nodes, workload, edge_weight_function)
    stages, notes = weighed_stages(workload, num_partitions, weights, edges, options)
    partition = make_partition(
        task.workload,
        layers.graph.name,
        "metis",
        [stages[group] for group in groups],
        notes=notes,
    )
    return replace(layers, partition=partition)


def grouped(workload: Workload, groups: Sequence[int], names: Sequence[str]) -> Workload:
    """The workload whose nodes are groups of nodes that stand next to one another.

    ``groups`` has the group of each node. What a group alone reads of its own counts no more.
    """
    seconds = [0.0] * len(names)
    for group, taken in zip(groups, workload.seconds, strict=True):
        seconds[group] += taken
    return Workload(
        tuple(names),
        tuple(seconds),
        tuple(_sent(workload, groups)),
        tuple(
            value._replace(readers=_distinct(groups, value.readers)) for value in workload.stored
        ),
    )


def _sent(workload: Workload, groups: Sequence[int]) -> Iterator[SentValue]:
    """What groups send to others."""
    for value in workload.sent:
        maker = groups[value.maker]
        readers = tuple(group for group in _distinct(groups, value.readers) if group != maker)
        if readers:
            yield value._replace(maker=maker, readers=readers)


def _distinct(groups: Sequence[int], nodes: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({groups[node] for node in nodes}))
