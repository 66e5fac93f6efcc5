"""What a partitioner is asked: a forward, the ranks of its stages, machines, and a memory limit.

Comes in: a graph, or the forward of a planned step. Goes out: a `Task`, which knows the workload
and what fits, and makes a `Partition` of what a partitioner decides. What always holds of that: it
is mended (`repair`), and fits in memory where a limit is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardwright.clusters import Cluster, Links
from shardwright.costs import Analytic, Costs
from shardwright.errors import PlanError
from shardwright.ir import IRGraph
from shardwright.ir.steps import is_step
from shardwright.planning.forward import forward_view
from shardwright.planning.given import check_cluster, check_count, check_graph, check_memory
from shardwright.planning.partitions.memory_limit import MemoryLimit, lacking
from shardwright.planning.partitions.partition import Partition, make_partition
from shardwright.planning.partitions.refine import most_seconds
from shardwright.planning.partitions.repair import repair
from shardwright.planning.partitions.shares import Shares
from shardwright.planning.partitions.workload import Workload, workload_of
from shardwright.planning.pipeline import check_stages
from shardwright.planning.training import held_bytes


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
        load: Callable[[Shares], float] = most_seconds,
    ) -> Partition:
        """The partition of these stages, mended; on the ranks that the schedule has by default.

        ``load`` is what mending may not make larger. Raises PlanError where it does not fit.
        """
        ranks = self.placement if ranks is None else ranks
        replicas = (1,) * (max(ranks) + 1) if replicas is None else replicas

        is_hollow = self.workload.is_hollow
        hollow = is_hollow(stages)

        def judged(shares: Shares) -> float:
            fits = self._lacking(shares, replicas)[1] <= 0
            return load(shares) if fits and (hollow or not is_hollow(shares.stages)) else math.inf

        mended = repair(self.workload, stages, ranks, load=judged)
        self._check_fits(Shares.of(self.workload, mended.stages, ranks), replicas)
        return make_partition(
            self.workload,
            self.view.name,
            policy,
            mended.stages,
            ranks=ranks,
            replicas=replicas,
            copies=mended.copies,
            notes=[*notes, *mended.notes],
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
                f"{lacking(self.limit.nbytes + beyond, self.limit.nbytes)}"
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
