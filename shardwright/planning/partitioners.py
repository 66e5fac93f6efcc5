"""Partitioners by name: each gives a `Partition` of a graph's forward.

Input: a graph, a model or a training step, and a number of stages. Output: a `Partition`.
`PARTITIONERS` has those that are policies of `plan`, which asks them with a `Task`.

metis
    Parts of equal seconds, few bytes between them, by METIS; then cut anew, along the order that
    they give or the nodes' own.
memory
    The same of equal bytes, of stored values and activations.
pipedream
    Contiguous stages with several slots where that is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast, overload

from shardwright.clusters import Cluster
from shardwright.costs import Costs
from shardwright.errors import PlanError
from shardwright.ir import IRGraph
from shardwright.planning.layer_graph import (
    LayerEdgeWeight,
    LayerGraph,
    LayerWeight,
    partition_layers,
)
from shardwright.planning.metis import (
    RECUT,
    Edge,
    EdgeWeight,
    NodeWeight,
    check_options,
    metis_stages,
    policy_nodes,
    weigh_edges,
    weigh_nodes,
    weighed_stages,
)
from shardwright.planning.options import check_devices
from shardwright.planning.partition import Partition, Task, task_of
from shardwright.planning.pipedream import pipedream
from shardwright.planning.postprocess import moved_note
from shardwright.planning.rules import batch_rows
from shardwright.planning.stages import by_bytes, contiguous, recut, stages_between

# --- policies -------------------------------------------------------------------------------------


def by_metis(task: Task) -> Partition:
    """Parts of equal seconds, few bytes between them."""
    workload = task.workload
    edges = {
        (value.maker, reader): float(value.nbytes)
        for value in workload.sent
        for reader in value.readers
    }
    stages, notes = metis_stages(workload, task.stages, workload.seconds, edges, {})
    better = recut(
        workload,
        stages,
        lambda nodes: contiguous(nodes, task.stages, task.limit),
        lambda shares: max(shares.seconds),
    )
    notes += moved_note(workload, stages, better, RECUT)
    stages, filled = _filled(task, better)
    return task.partition("metis", stages, [*notes, *filled])


def by_memory(task: Task) -> Partition:
    """Parts of equal bytes, few seconds between them."""
    return _by_bytes(task, None, {})


def by_pipedream(task: Task) -> Partition:
    """Contiguous stages, several slots each where that is faster."""
    found = pipedream(
        task.workload,
        task.cluster,
        rows=max(1, batch_rows(task.view)) if task.rows is None else task.rows,
        microbatches=task.microbatches,
        gradients=_gradient_share(task),
        limit=task.limit,
    )
    return task.partition(
        "pipedream",
        stages_between(found.cuts),
        ranks=range(len(found.replicas)),
        replicas=found.replicas,
    )


def _filled(task: Task, stages: list[int]) -> tuple[list[int], list[str]]:
    """The stages; where one of them reads nothing stored, the best cut in which all do, and a note.

    Where messages take longer than all work, the best stages by seconds are all but empty ones.
    """
    if not task.workload.is_hollow(stages):
        return stages, []
    try:
        found = contiguous(task.workload, task.stages, task.limit, anchored=True)
    except PlanError:
        return stages, []
    note = (
        "the best contiguous cut in which every stage reads parameters: messages take so long that "
        "stages with next to nothing to do would be quicker"
    )
    return found, [note]


PARTITIONERS: Mapping[str, Callable[[Task], Partition]] = {
    "metis": by_metis,
    "memory": by_memory,
    "pipedream": by_pipedream,
}
"""By the name of the policy."""


def _gradient_share(task: Task) -> float:
    """The share of what a slot holds that is gradients, which its replicas add up."""
    if task.step is None:
        return 0.0
    held = sum(value.nbytes for value in task.workload.stored) or 1
    own = sum(v.nbytes for v in task.view.stored() if v.role == "param" and v.users)
    return min(1.0, own / held)


def _by_bytes(
    task: Task, edges: Mapping[Edge, float] | None, options: Mapping[str, int]
) -> Partition:
    """Parts of equal bytes: a stored value counts with its first reader, the rest as it is kept."""
    workload = task.workload
    weights = [0.0] * len(workload)
    for stored in workload.stored:
        weights[stored.readers[0]] += stored.nbytes
    for value in workload.sent:
        weights[value.maker] += value.kept
    if edges is None:
        edges = {(v.maker, reader): float(v.nbytes) for v in workload.sent for reader in v.readers}
    stages, notes = metis_stages(workload, task.stages, weights, edges, options)
    better = recut(
        workload,
        stages,
        lambda nodes: by_bytes(nodes, task.stages, task.occupied),
        lambda shares: max(task.occupied.held(shares)),
    )
    notes += moved_note(workload, stages, better, RECUT)
    return task.partition("memory", better, notes)


# --- functions ------------------------------------------------------------------------------------


@overload
def metis_partition(
    graph: IRGraph,
    num_partitions: int,
    node_weight_function: NodeWeight | None = None,
    edge_weight_function: EdgeWeight | None = None,
    **metis_options: int,
) -> Partition: ...


@overload
def metis_partition(
    graph: LayerGraph,
    num_partitions: int,
    node_weight_function: LayerWeight | None = None,
    edge_weight_function: LayerEdgeWeight | None = None,
    **metis_options: int,
) -> LayerGraph: ...


def metis_partition(
    graph: IRGraph | LayerGraph,
    num_partitions: int,
    node_weight_function: NodeWeight | LayerWeight | None = None,
    edge_weight_function: EdgeWeight | LayerEdgeWeight | None = None,
    **metis_options: int,
) -> Partition | LayerGraph:
    """Partition a graph with METIS, number its parts as stages, and refine them.

    ``node_weight_function`` gives the weight of a node (`PolicyNode`: operator, scope, inputs and
    outputs), ``edge_weight_function`` that of an edge from a node to one of its readers; both are 1
    by default. ``metis_options`` are METIS's own: ``seed``, ``ufactor``, ``niter``, ….

    The nodes of a graph from `build_graph` are layers (`LayerNode`), which stay whole. The result
    is then that graph with its partition.

    Raises PlanError for a weight that is negative or NaN, for an option that METIS does not have,
    and for more parts than nodes.
    """
    if isinstance(graph, LayerGraph):
        weigh = cast("LayerWeight | None", node_weight_function)
        weigh_edge = cast("LayerEdgeWeight | None", edge_weight_function)
        return partition_layers(graph, num_partitions, weigh, weigh_edge, metis_options)
    check_options(metis_options)
    task = task_of(graph, num_partitions)
    nodes = policy_nodes(task.view)
    weights = weigh_nodes(nodes, cast("NodeWeight | None", node_weight_function))
    edges = weigh_edges(nodes, task.workload, cast("EdgeWeight | None", edge_weight_function))
    stages, notes = weighed_stages(task.workload, num_partitions, weights, edges, metis_options)
    return task.partition("metis", stages, notes)


def partition_by_memory(
    graph: IRGraph,
    num_partitions: int,
    edge_weight_function: EdgeWeight | None = None,
    **metis_options: int,
) -> Partition:
    """Partition a graph with METIS into parts of equal bytes.

    Bytes are those of stored values and, for a training step, of gradients, optimizer state and
    activations. Raises PlanError as `metis_partition` does.
    """
    check_options(metis_options)
    task = task_of(graph, num_partitions)
    edges = None
    if edge_weight_function is not None:
        edges = weigh_edges(policy_nodes(task.view), task.workload, edge_weight_function)
    return _by_bytes(task, edges, metis_options)


def pipedream_partition(
    graph: IRGraph,
    devices: int | Cluster,
    *,
    costs: Costs | None = None,
    microbatches: int = 1,
    memory: float | None = None,
) -> Partition:
    """PipeDream's partition on all devices: contiguous stages, some replicated on several devices.

    ``memory`` is in bytes per device, by default that of the cluster's device. Raises PlanError if
    no partition fits.
    """
    check_devices(devices)
    cluster = devices if isinstance(devices, Cluster) else Cluster.of(devices)
    memory = float(cluster.device.memory) if memory is None else memory
    return by_pipedream(
        task_of(graph, 1, cluster=cluster, costs=costs, microbatches=microbatches, memory=memory)
    )


METIS_partition = metis_partition
"""The seed's name."""
