"""Partitions of layers: METIS over whole modules, so that none of them is cut.

Comes in: a `LayerGraph`, weights of layers and of what flows between them. Goes out: the same with
its partition. What always holds: the nodes of a layer are in one stage; stages that do something
again do all of a layer again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from shardwright.errors import PlanError
from shardwright.planning.copies import Copy
from shardwright.planning.partitions.layers import LayerGraph, LayerNode
from shardwright.planning.partitions.metis import check_options, weigh_edges, weigh_nodes
from shardwright.planning.partitions.partition import make_partition
from shardwright.planning.partitions.partition_task import task_of
from shardwright.planning.partitions.repair import repair
from shardwright.planning.partitions.shares import Shares
from shardwright.planning.partitions.weighed import WeighedStages, weighed_stages
from shardwright.planning.partitions.workload import Sent, Workload

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
    found = weighed_stages(workload, num_partitions, weights, edges, options)
    mended = repair(workload, found.stages, load=_keeping_stored(workload, found))
    partition = make_partition(
        task.workload,
        layers.graph.name,
        "metis",
        [mended.stages[group] for group in groups],
        copies=list(_copies(layers, mended.copies)),
        notes=[*found.notes, *mended.notes],
    )
    return replace(layers, partition=partition)


def _keeping_stored(workload: Workload, found: WeighedStages) -> Callable[[Shares], float]:
    """The load, without end where a stage would be left that reads nothing stored."""
    if workload.is_hollow(found.stages):
        return found.load
    return lambda shares: math.inf if workload.is_hollow(shares.stages) else found.load(shares)


def _copies(layers: LayerGraph, copies: Sequence[Copy]) -> Iterator[Copy]:
    """Copies of nodes, for those of layers."""
    for copy in copies:
        yield from (Copy(node.number, copy.stage) for node in layers.nodes[copy.node].nodes)


def grouped(workload: Workload, groups: Sequence[int], names: Sequence[str]) -> Workload:
    """The workload whose nodes are groups of nodes that stand next to one another.

    ``groups`` has the group of each node. What a group alone reads of its own counts no more. A
    group can be done again where all of its nodes can.
    """
    seconds = [0.0] * len(names)
    for group, taken in zip(groups, workload.seconds, strict=True):
        seconds[group] += taken
    fixed = {group for node, group in enumerate(groups) if node not in workload.repeatable}
    return Workload(
        tuple(names),
        tuple(seconds),
        tuple(_sent(workload, groups)),
        tuple(
            value._replace(readers=_distinct(groups, value.readers)) for value in workload.stored
        ),
        frozenset(range(len(names))) - fixed,
    )


def _sent(workload: Workload, groups: Sequence[int]) -> Iterator[Sent]:
    """What groups send to others."""
    for value in workload.sent:
        maker = groups[value.maker]
        readers = tuple(group for group in _distinct(groups, value.readers) if group != maker)
        if readers:
            yield value._replace(maker=maker, readers=readers)


def _distinct(groups: Sequence[int], nodes: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({groups[node] for node in nodes}))
