"""Partition: in which stage each node of a forward is, and how well that shares out the work.

Every partitioner gives one. Invariant: stages are numbered in the order in which they can
be done, so that no node reads what a later stage makes; every stage has a node; and a stage's rank
is the pipeline rank that has it, of ``replicas`` slots that share its microbatches' rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
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
from shardwright.planning.plan import Copy
from shardwright.planning.postprocess import named
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
    copies
        Nodes that other stages compute again instead of receiving their results.
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
    copies: tuple[Copy, ...] = ()
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
    copies: Sequence[Copy] = (),
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
        tuple(copies),
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
        copies, copied = worthwhile_copies(self.workload, stages, ranks)
        return make_partition(
            self.workload,
            self.view.name,
            policy,
            stages,
            ranks=ranks,
            replicas=replicas,
            copies=copies,
            notes=[*notes, *copied],
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


# --- operator replication -------------------------------------------------------------------------
#
# Some nodes are cheaper to do again in another stage than to receive what they make: views,
# numbers, and what is made of inputs and buffers alone.


LARGEST_CONE = 24
"""So many nodes are done again for one value at most."""
GAIN = 1e-9
"""Seconds that a copy has to save."""


def worthwhile_copies(
    workload: Workload, stages: Sequence[int], ranks: Sequence[int] | None = None
) -> tuple[list[Copy], list[str]]:
    """What other stages do again, by positions in the workload, and a note for each such stage.

    Stage s is on rank ``ranks[s]``, on its own by default.
    """
    ranks = range(max(stages, default=-1) + 1) if ranks is None else ranks
    copying = _Copying(Shares.of(workload, stages, ranks))
    copying.run()
    return sorted(copying.copies), list(copying.notes())


@dataclass(slots=True)
class _Copying:
    """Finds what is better done again than sent, last nodes first."""

    shares: Shares
    copies: set[Copy] = field(default_factory=set)
    made: list[list[int]] = field(default_factory=list)
    """The values that each node makes."""
    read: list[list[int]] = field(default_factory=list)
    """The values that each node reads."""
    reading: list[set[int]] = field(default_factory=list)
    """The stages that read each value."""

    def __post_init__(self) -> None:
        workload = self.shares.workload
        self.made = [[] for _ in workload.seconds]
        self.read = [[] for _ in workload.seconds]
        for number, value in enumerate(workload.sent):
            self.made[value.maker].append(number)
            for reader in value.readers:
                self.read[reader].append(number)
            self.reading.append({self.shares.stages[reader] for reader in value.readers})

    def run(self) -> None:
        """Copy whatever is worth it."""
        repeatable = self.shares.workload.repeatable
        for node in reversed(range(len(self.shares.stages))):
            if node in repeatable:
                for rank in self._receivers(node):
                    self._consider(node, rank)

    def _receivers(self, node: int) -> list[int]:
        """The other ranks that read what a node makes."""
        ranks = {self.shares.ranks[s] for number in self.made[node] for s in self.reading[number]}
        return sorted(ranks - {self.shares.rank(node)})

    def _consider(self, node: int, rank: int) -> None:
        """Do a node again on a rank, with what it needs there, where that is cheaper."""
        workload = self.shares.workload
        sent = sum(workload.sent[n].seconds for n in self.made[node] if self._arrives(n, rank))
        cone, leaves = self._cone(node, rank)
        again = sum(workload.seconds[i] for i in cone)
        instead = sum(workload.sent[n].seconds for n in leaves)
        if len(cone) > LARGEST_CONE or again + instead >= sent - GAIN or not self._keeps_work(cone):
            return
        for stage in self._stages(node, rank):
            self.copies.update(Copy(i, stage) for i in cone)
            for i in cone:
                for number in self.read[i]:
                    self.reading[number].add(stage)
        for i in cone:
            for number in self.made[i]:
                self.reading[number] = {
                    s for s in self.reading[number] if self.shares.ranks[s] != rank
                }

    def _cone(self, node: int, rank: int) -> tuple[list[int], set[int]]:
        """What has to be done again on a rank for a node, and what has to be sent for that."""
        sent, repeatable = self.shares.workload.sent, self.shares.workload.repeatable
        cone, pending = {node}, [node]
        leaves: set[int] = set()
        while pending and len(cone) <= LARGEST_CONE:
            for number in self.read[pending.pop()]:
                maker = sent[number].maker
                if self.shares.rank(maker) == rank or maker in cone:
                    continue
                if maker in repeatable and not self._arrives(number, rank):
                    cone.add(maker)
                    pending.append(maker)
                elif not self._arrives(number, rank):
                    leaves.add(number)
        return sorted(cone), leaves

    def _arrives(self, number: int, rank: int) -> bool:
        """Whether a value is sent to a rank as things are."""
        return any(self.shares.ranks[stage] == rank for stage in self.reading[number])

    def _stages(self, node: int, rank: int) -> list[int]:
        """The stages of a rank that read what a node makes."""
        stages = {s for number in self.made[node] for s in self.reading[number]}
        return sorted(stage for stage in stages if self.shares.ranks[stage] == rank)

    def _keeps_work(self, cone: Sequence[int]) -> bool:
        """Whether every stage keeps a node that is not done elsewhere instead."""
        away = {copy.node for copy in self.copies} | set(cone)
        left = {stage for node, stage in enumerate(self.shares.stages) if node not in away}
        return len(left) == len(self.shares.nodes)

    def notes(self) -> Iterator[str]:
        """What each stage does again."""
        for stage in sorted({copy.stage for copy in self.copies}):
            nodes = sorted(copy.node for copy in self.copies if copy.stage == stage)
            yield (
                f"stage {stage} does {named(self.shares.workload, nodes)} again, which is quicker "
                "than to receive what they make"
            )
