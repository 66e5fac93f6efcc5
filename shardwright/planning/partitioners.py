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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple, cast, overload

import numpy as np

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
from shardwright.planning.rules import batch_rows
from shardwright.planning.stages import (
    TOLERANCE,
    MemoryLimit,
    Table,
    Tables,
    by_bytes,
    contiguous,
    cut_places,
    range_tables,
    shortage_text,
    stages_between,
)
from shardwright.planning.workload import Workload

# --- policies -------------------------------------------------------------------------------------


def by_metis(task: Task) -> Partition:
    """Parts of equal seconds, few bytes between them."""

    def cut(nodes: Workload) -> list[int]:
        # Where messages take longer than all work, the best stages by seconds are all but empty.
        try:
            return contiguous(nodes, task.stages, task.limit, anchored=True)
        except PlanError:
            return contiguous(nodes, task.stages, task.limit)

    stages, notes = metis_stages(
        task.workload,
        task.stages,
        task.workload.seconds,
        _bytes_of_edges(task.workload),
        {},
        cut,
        lambda shares: max(shares.seconds),
    )
    return task.partition("metis", stages, notes)


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
    stages, notes = metis_stages(
        workload,
        task.stages,
        weights,
        _bytes_of_edges(workload) if edges is None else edges,
        options,
        lambda nodes: by_bytes(nodes, task.stages, task.occupied),
        lambda shares: max(task.occupied.held(shares)),
    )
    return task.partition("memory", stages, notes)


def _bytes_of_edges(workload: Workload) -> dict[Edge, float]:
    return {(v.maker, reader): float(v.nbytes) for v in workload.sent for reader in v.readers}


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
    """Partition a graph with METIS, and make its parts stages.

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


# --- PipeDream's dynamic program ------------------------------------------------------------------


LARGEST_TABLE = 5e8
"""Entries to look at; cuts are tried at fewer places where there would be more."""


class PipedreamCut(NamedTuple):
    """Where stages begin and the last one ends, how many slots each has, and the slowest's time."""

    cuts: list[int]
    replicas: list[int]
    seconds: float


def pipedream(
    workload: Workload,
    cluster: Cluster,
    *,
    rows: int,
    microbatches: int = 1,
    gradients: float = 1.0,
    limit: MemoryLimit | None = None,
) -> PipedreamCut:
    """The best cut on all slots of a cluster. Raises PlanError where none fits in memory.

    ``rows`` are those of a microbatch: a stage has as many slots at most. ``gradients`` is the
    share of a stage's stored bytes that its slots add up once a step; 0 of a model that is not
    trained.
    """
    slots = len(cluster.devices)
    stages = min(slots, len(workload))
    most = max(8, int((LARGEST_TABLE / max(1, stages * slots * slots)) ** 0.5))
    places = cut_places(workload, stages, most)
    tables = range_tables(workload, places)
    search = _PipedreamSearch(tables, cluster, rows, microbatches, gradients, limit)
    return search.run(stages, places)


class _PipedreamChoice(NamedTuple):
    """What the best way from each place on begins with: its end, and its slots."""

    stop: np.ndarray
    replicas: np.ndarray


@dataclass(slots=True)
class _PipedreamSearch:
    """``best[s][m]`` has, for each place, the time of the best s stages on the last m slots."""

    tables: Tables
    cluster: Cluster
    rows: int
    microbatches: int
    gradients: float
    limit: MemoryLimit | None
    by_bytes: bool = False
    """Whether the most bytes of a slot shall be few, in place of the most seconds."""
    best: list[dict[int, np.ndarray]] = field(default_factory=list)
    choices: list[dict[int, _PipedreamChoice]] = field(default_factory=list)

    def run(self, stages: int, places: Sequence[int]) -> PipedreamCut:
        slots, size = len(self.cluster.devices), len(places)
        done = np.full(size, np.inf)
        done[-1] = 0.0
        self.best, self.choices = [{0: done}], [{}]
        for count in range(1, stages + 1):
            self._add(count, slots)
        times = [found[slots][0] if slots in found else np.inf for found in self.best]
        least = min(times)
        if not np.isfinite(least):
            raise PlanError(self._why(stages, places))
        count = next(i for i, time in enumerate(times) if time <= least * (1 + TOLERANCE))
        return self._follow(count, slots, places, float(least))

    def _add(self, count: int, slots: int) -> None:
        """The best ways with one stage more, on any number of slots."""
        size = len(self.tables.seconds)
        best: dict[int, np.ndarray] = {}
        choices: dict[int, _PipedreamChoice] = {}
        for used in range(count, slots + 1):
            time, stop, many = np.full(size, np.inf), np.zeros(size, int), np.zeros(size, int)
            for replicas in range(1, min(used, self.rows) + 1):
                rest = self.best[count - 1].get(used - replicas)
                if rest is None:
                    continue
                joined = np.maximum(self._stage(count, used, replicas), rest[None, :])
                at, found = joined.argmin(1), joined.min(1)
                better = found < time * (1 - TOLERANCE)
                better |= ~np.isfinite(time) & np.isfinite(found)
                time[better], stop[better], many[better] = found[better], at[better], replicas
            best[used], choices[used] = time, _PipedreamChoice(stop, many)
        self.best.append(best)
        self.choices.append(choices)

    def _stage(self, from_end: int, used: int, replicas: int) -> Table:
        """The time of each range as a stage of so many slots, the first of the last ``used``."""
        tables, devices = self.tables, self.cluster.devices
        first = len(devices) - used
        own = devices[first : first + replicas]
        seconds = tables.seconds / replicas
        if replicas > 1 and self.gradients:
            links = self.cluster.among(own)
            add_up = _all_reduce(links.seconds, replicas, self.gradients * tables.stored)
            seconds = seconds + add_up / self.microbatches
        if self.limit is None:
            return seconds
        under_way = self.limit.under_way(0, from_end)
        held = tables.stored + under_way * tables.kept / replicas
        if self.by_bytes:
            return np.where(np.isfinite(seconds), held, np.inf)
        return np.where(held <= self.limit.nbytes, seconds, np.inf)

    def _follow(
        self, count: int, slots: int, places: Sequence[int], seconds: float
    ) -> PipedreamCut:
        cuts, replicas, at = [0], [], 0
        for left in range(count, 0, -1):
            choice = self.choices[left][slots]
            replicas.append(int(choice.replicas[at]))
            slots -= replicas[-1]
            at = int(choice.stop[at])
            cuts.append(places[at])
        return PipedreamCut(cuts, replicas, seconds)

    def _why(self, stages: int, places: Sequence[int]) -> str:
        """What stands in the way: memory, or rows too few for the slots."""
        slots, limit = len(self.cluster.devices), self.limit
        if limit is None or stages * self.rows < slots:
            return (
                f"{slots} slots have no work: {stages} stages of at most {self.rows} slots, one a "
                "row of a microbatch; use fewer slots, or capture with a larger batch"
            )
        search = replace(self, by_bytes=True, best=[], choices=[])
        nearest = search.run(stages, places)
        return (
            f"no cut on {slots} slots fits in {limit.nbytes:.0f} bytes a slot: even the least full "
            f"leaves slot {search.fullest(nearest, places)!r} with "
            f"{shortage_text(nearest.seconds, limit.nbytes)}"
        )

    def fullest(self, found: PipedreamCut, places: Sequence[int]) -> str:
        """The first slot of the stage for which a cut has the most of what is counted."""
        before = list(accumulate(found.replicas, initial=0))
        count, slots = len(found.replicas), before[-1]
        cuts = [places.index(cut) for cut in found.cuts]
        most = [
            self._stage(count - stage, slots - before[stage], replicas)[
                cuts[stage], cuts[stage + 1]
            ]
            for stage, replicas in enumerate(found.replicas)
        ]
        return self.cluster.devices[before[most.index(max(most))]]


def _all_reduce(price: Callable[..., float], members: int, nbytes: Table) -> Table:
    """Seconds of adding up so many bytes; the price is a start and a rate."""
    start = price("all_reduce", members, 0)
    rate = (price("all_reduce", members, 10**9) - start) / 10**9
    found: Table = np.where(nbytes > 0, start + rate * nbytes, 0.0)
    return found
