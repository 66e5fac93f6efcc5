"""Partition: in which stage each node of a forward is, and how well that shares out the work.

Every partitioner gives one. Invariant: stages are numbered in the order in which they can
be done, so that no node reads what a later stage makes; every stage has a node; and a stage's rank
is the pipeline rank that has it, of ``replicas`` slots that share its microbatches' rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec

from shardwright.clusters import Cluster, Links
from shardwright.costs import Analytic, Costs
from shardwright.errors import PlanError
from shardwright.ir import IRGraph
from shardwright.ir.graph import is_step
from shardwright.ir.tensor_meta import count_text
from shardwright.planning.options import check_cluster, check_count, check_graph, check_memory
from shardwright.planning.pipeline import check_stages, held_bytes
from shardwright.planning.stages import MemoryLimit, shortage_text
from shardwright.planning.step_graph import forward_view
from shardwright.planning.workload import Shares, Workload, workload_of


class Share(msgspec.Struct, frozen=True):
    """What a stage has: nodes, seconds of a microbatch with its messages, bytes that it holds."""

    nodes: int
    seconds: float
    stored_bytes: int


class Partition(msgspec.Struct, frozen=True):
    """The stage of each node.

    stages
        By position in the forward (`forward_view`).
    ranks, replicas
        The pipeline rank of each stage, and the number of devices of each rank.
    shares
        The load of each stage.
    crossing
        Bytes between stages for one microbatch, including gradients.
    notes
        Decisions, in words.
    """

    graph: str
    policy: str
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    replicas: tuple[int, ...]
    shares: tuple[Share, ...]
    crossing: int = 0
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"partition of {self.graph}: {self.policy}, {len(self.ranks)} stages, "
            f"{self.crossing / 1e6:.3f} MB between them"
        ]
        lines += [
            f"  stage {stage}{self._where(stage)}: {count_text(share.nodes, 'node')}, "
            f"{1e3 * share.seconds:.3f} ms, {share.stored_bytes / 1e6:.2f} MB stored"
            for stage, share in enumerate(self.shares)
        ]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def _where(self, stage: int) -> str:
        rank = self.ranks[stage]
        chunked = f" on rank {rank}" if len(self.replicas) < len(self.ranks) else ""
        count = self.replicas[rank]
        return chunked + (f" on {count} slots" if count > 1 else "")


def make_partition(
    workload: Workload,
    graph: str,
    policy: str,
    stages: Sequence[int],
    *,
    ranks: Sequence[int] | None = None,
    replicas: Sequence[int] | None = None,
    notes: Sequence[str] = (),
) -> Partition:
    """The partition in which each node is in the stage at its place.

    One rank a stage, and one slot a rank, by default.
    """
    count = max(stages, default=-1) + 1
    found = Shares.of(workload, stages, range(count))
    assert all(found.nodes), f"a stage has no node: {found.nodes}"
    assert all(
        stages[value.maker] <= stages[reader] for value in workload.sent for reader in value.readers
    ), "stages are numbered in an order in which they can be done"
    ranks = tuple(range(count)) if ranks is None else tuple(ranks)
    return Partition(
        graph,
        policy,
        tuple(stages),
        ranks,
        tuple(replicas) if replicas is not None else (1,) * (max(ranks, default=-1) + 1),
        tuple(
            Share(found.nodes[i], found.seconds[i], round(found.stored[i])) for i in range(count)
        ),
        found.crossing,
        tuple(notes),
    )


# --- what a partitioner is asked -----------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """What is to be partitioned, and for what.

    view, first
        The forward, of which the first nodes are done once a step and are in no stage.
    placement
        The rank of each stage, as the schedule has it.
    step
        The training step whose forward it is; None of a model.
    memory
        Bytes of a slot; None where that is not asked for.
    rows
        How many slots may share a stage's microbatches; as many as these have rows by default.
    recompute
        Whether the backward computes again what a stage's own nodes make.
    slots, shards
        How many slots of a rank share its work, and in how many shards of the batch.
    leaders
        The first slot of each rank, for messages; the cluster's own order by default.
    """

    view: IRGraph
    placement: tuple[int, ...]
    cluster: Cluster
    costs: Costs
    step: IRGraph | None = None
    first: int = 0
    microbatches: int = 1
    schedule: str = "1f1b"
    memory: float | None = None
    rows: int | None = None
    recompute: bool = False
    slots: int = 1
    shards: int = 1
    leaders: tuple[str, ...] = ()

    @property
    def stages(self) -> int:
        """How many stages there shall be."""
        return len(self.placement)

    @cached_property
    def workload(self) -> Workload:
        """The nodes to deal out."""
        found = self._whole_workload()
        if self.slots > 1:
            found = found.shared(self.slots, self.shards)
        if not self.recompute:
            return found
        return replace(found, sent=tuple(value._replace(kept=0) for value in found.sent))

    def _whole_workload(self) -> Workload:
        """What a rank of one slot has of them that computes nothing again."""
        return workload_of(
            self.view,
            self.costs,
            self.links,
            step=self.step,
            held=None if self.step is None else held_bytes(self.step),
            first=self.first,
        )

    @property
    def links(self) -> Links:
        """What links any two slots: the slower ones, where there are several hosts."""
        return self.cluster.among(self.cluster.devices)

    @property
    def occupied(self) -> MemoryLimit:
        """How the schedule fills memory, and how much of it there is; without end by default."""
        limit = math.inf if self.memory is None else self.memory
        names = tuple(self._slot(rank) for rank in self.placement)
        if self.step is None:
            return MemoryLimit(limit, names=names)
        chunks = self.stages // (max(self.placement) + 1)
        return MemoryLimit(limit, self.microbatches, self.schedule, chunks, names)

    def _slot(self, at: int) -> str:
        """The first slot of a rank, where each rank before it has one leader."""
        leaders = self.leaders or self.cluster.devices
        return leaders[at] if at < len(leaders) else f"d{at}"

    @property
    def limit(self) -> MemoryLimit | None:
        """What fits in a slot, where there is a limit."""
        return None if self.memory is None else self.occupied

    def partition(
        self,
        policy: str,
        stages: Sequence[int],
        notes: Sequence[str] = (),
        *,
        ranks: Sequence[int] | None = None,
        replicas: Sequence[int] | None = None,
    ) -> Partition:
        """The partition of these stages, on the ranks that the schedule has by default.

        Raises PlanError where it does not fit in memory.
        """
        ranks = self.placement if ranks is None else ranks
        replicas = (1,) * (max(ranks) + 1) if replicas is None else replicas
        self._check_fits(Shares.of(self.workload, stages, ranks), replicas)
        return make_partition(
            self.workload,
            self.view.name,
            policy,
            stages,
            ranks=ranks,
            replicas=replicas,
            notes=notes,
        )

    def _lacking(self, shares: Shares, replicas: Sequence[int]) -> tuple[int, float]:
        """The fullest rank, and how many bytes it holds beyond what fits."""
        if self.limit is None:
            return 0, -math.inf
        held = self.limit.held(shares, replicas)
        fullest = max(range(len(held)), key=held.__getitem__)
        return fullest, held[fullest] - self.limit.nbytes

    def _check_fits(self, shares: Shares, replicas: Sequence[int]) -> None:
        """Raise PlanError where a rank holds more than fits."""
        fullest, beyond = self._lacking(shares, replicas)
        if self.limit is not None and beyond > 0:
            raise PlanError(
                f"the best stages found do not fit in memory: slot "
                f"{self._slot(sum(replicas[:fullest]))!r} would hold "
                f"{shortage_text(self.limit.nbytes + beyond, self.limit.nbytes)}"
            )


def task_of(
    graph: IRGraph,
    stages: int,
    *,
    cluster: Cluster | None = None,
    costs: Costs | None = None,
    microbatches: int = 1,
    memory: float | None = None,
) -> Task:
    """The task of cutting a graph's forward in stages, each on a rank of its own.

    Raises PlanError where there are fewer nodes than stages, and for what is no graph or number.
    """
    check_graph(graph)
    check_count("microbatches", microbatches)
    check_memory(memory)
    check_cluster(cluster)
    view = forward_view(graph)
    check_stages(len(view.nodes), stages, graph.name)
    cluster = cluster or Cluster.of(stages)
    return Task(
        view,
        tuple(range(stages)),
        cluster,
        costs or Analytic(cluster.device),
        graph if is_step(graph) else None,
        microbatches=microbatches,
        memory=memory,
    )
