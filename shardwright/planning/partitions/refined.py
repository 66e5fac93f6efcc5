"""Refinement by itself: a partition that is there, made better by moves of single nodes.

Comes in: a graph, and a partition of it, whoever made it: a partitioner, or a person who says the
stage of each node. Goes out: a `Partition` that is no worse. What always holds: stages keep their
ranks and the ranks their replicas, and what was moved is a note.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import truediv

import msgspec

from shardwright.errors import PlanError
from shardwright.ir import IRGraph
from shardwright.layout import Cluster
from shardwright.planning.given import check_cluster, check_graph, check_slots
from shardwright.planning.partitions.ordering import moved_note
from shardwright.planning.partitions.partition import Partition
from shardwright.planning.partitions.partition_task import task_of
from shardwright.planning.partitions.refine import refine
from shardwright.planning.partitions.shares import Shares
from shardwright.planning.partitions.weighed import REFINED
from shardwright.planning.partitions.workload import Workload
from shardwright.profiling import Costs

BY_HAND = "by hand"


def refine_partition(
    graph: IRGraph,
    partition: Partition | Sequence[int],
    *,
    cluster: Cluster | None = None,
    costs: Costs | None = None,
    microbatches: int = 1,
    memory: float | None = None,
) -> Partition:
    """The partition after moves of single nodes that keep its stages acyclic.

    ``partition`` is what a partitioner gave, or the stage of each node of the graph, or of a
    training step's forward, in order. Better is what exceeds ``memory``, bytes a slot, by less;
    then what leaves fewer seconds to the busiest rank; then what sends less. Raises PlanError where
    the partition is of another graph or its stages need one another, and where none fits.
    """
    check_graph(graph)
    check_cluster(cluster)
    given = partition if isinstance(partition, Partition) else _by_hand(graph, partition)
    check_slots(cluster, sum(given.replicas))
    task = task_of(
        graph,
        len(given.ranks),
        cluster=cluster or Cluster.of(sum(given.replicas)),
        costs=costs,
        microbatches=microbatches,
        memory=memory,
    )
    task = replace(task, placement=given.ranks)
    _check(task.workload, given)

    def busiest(shares: Shares) -> float:
        most: float = max(map(truediv, shares.seconds, given.replicas))
        return most

    found = refine(task.workload, given.stages, ranks=given.ranks, limit=task.limit, load=busiest)
    notes = [*given.notes, *moved_note(task.workload, given.stages, found, REFINED)]
    made = task.partition(given.policy, found, notes, replicas=given.replicas, load=busiest)
    return msgspec.structs.replace(made, notes=tuple(dict.fromkeys(made.notes)))


def _by_hand(graph: IRGraph, stages: object) -> Partition:
    """The partition of a person's stages, each on a rank of its own."""
    found = tuple(stages) if isinstance(stages, Iterable) else ()
    wrong = [stage for stage in found if type(stage) is not int or stage < 0]
    if wrong or not found:
        raise PlanError(
            f"a partition of {graph.name!r} is what a partitioner gave, or the number of each "
            f"node's stage, from 0 up, found {wrong[0] if wrong else stages!r}"
        )
    if max(found) >= len(found):
        raise PlanError(
            f"stage {max(found)} is among those of {len(found)} nodes; number stages from 0 up, "
            "each with a node"
        )
    ranks = tuple(range(max(found) + 1))
    return Partition(graph.name, BY_HAND, found, ranks, (1,) * len(ranks), ())


def _check(workload: Workload, given: Partition) -> None:
    """Raise PlanError where these are no stages of the workload's nodes."""
    stages, count = given.stages, len(given.ranks)
    if len(stages) != len(workload):
        raise PlanError(
            f"the partition of {given.graph!r} has stages of {len(stages)} nodes, the graph has "
            f"{len(workload)}; partition this graph"
        )
    if missing := set(range(count)).symmetric_difference(stages):
        raise PlanError(
            f"stage {min(missing)} of {count} has no node, or is none; number stages from 0 up, "
            "each with a node"
        )
    for value in workload.sent:
        early = min(value.readers, key=stages.__getitem__)
        if stages[early] < stages[value.maker]:
            raise PlanError(
                f"{workload.names[early]!r} in stage {stages[early]} reads what "
                f"{workload.names[value.maker]!r} in stage {stages[value.maker]} makes; number "
                "stages so that nothing reads what a later one makes"
            )
