"""Operator replication: nodes that several stages do, each for itself, so that nothing is sent.

`with_copies` gives the graph with a copy of each behind the original, read by what stands in its
stage: every other value and node keeps its id, and the graph computes the same. `worthwhile_copies`
finds what is cheaper to do again than to receive: views, numbers, and what is made of inputs and
buffers alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from shardwright.errors import PlanError
from shardwright.ir import IRGraph, IRNode
from shardwright.planning.plan import Copy
from shardwright.planning.postprocess import named
from shardwright.planning.workload import Shares, Workload


def with_copies(
    graph: IRGraph, copies: Sequence[Copy], stages: Sequence[int]
) -> tuple[IRGraph, list[int]]:
    """The graph with these copies, and the stage of each of its first nodes.

    ``stages`` are those of the first nodes of the graph as it is; those behind them read originals.
    """
    if not copies:
        return graph, list(stages)
    writing = _CopyWriter(graph)
    found = []
    by_node = {at: list(same) for at, same in groupby(sorted(copies), key=lambda copy: copy.node)}
    for position, node in enumerate(graph.nodes):
        stage = stages[position] if position < len(stages) else None
        writing.add(node, stage)
        found += [stage] if stage is not None else []
        for copy in by_node.get(position, ()):
            writing.add_copy(node, copy.stage)
            found.append(copy.stage)
    return writing.finish(), found


def copied(graph: IRGraph, copies: Sequence[Copy], stages: Sequence[int]) -> IRGraph:
    """As `with_copies`, from the stages of the result. Raises PlanError where they do not fit."""
    originals = list(stages)
    for copy in sorted(copies, reverse=True):
        at = copy.node + sum(other < copy for other in copies) + 1
        if at >= len(originals) or originals.pop(at) != copy.stage:
            raise PlanError(
                f"the plan's copy of node {copy.node} in stage {copy.stage} is not where its "
                "stages have it; plan again"
            )
    return with_copies(graph, copies, originals)[0]


class _CopyWriter:
    """A graph written again, under the ids it has."""

    def __init__(self, graph: IRGraph) -> None:
        self._graph = replace(
            graph,
            values={v: replace(value, users=[]) for v, value in graph.values.items()},
            nodes=[],
            _taken=dict(graph._taken),
        )
        self._copies: dict[tuple[int, int], int] = {}
        """The copy of a value that a stage has."""

    def add(self, node: IRNode, stage: int | None) -> None:
        """The node itself, reading what its stage has."""
        self._append(replace(node, inputs=self._read(node, stage)))

    def add_copy(self, node: IRNode, stage: int) -> None:
        """The node once more, for a stage."""
        outputs = []
        for value_id in node.outputs:
            value = self._graph.values[value_id]
            made = self._graph.new_value(
                value.name, value.shape, value.dtype, device=value.device, strides=value.strides
            )
            self._copies[value_id, stage] = made.id
            outputs.append(made.id)
        again = replace(
            node, id=self._graph.fresh_id(), inputs=self._read(node, stage), outputs=outputs
        )
        for value_id in outputs:
            self._graph.values[value_id].producer = again.id
        self._append(again)

    def _read(self, node: IRNode, stage: int | None) -> list[int]:
        if stage is None:
            return list(node.inputs)
        return [self._copies.get((value_id, stage), value_id) for value_id in node.inputs]

    def _append(self, node: IRNode) -> None:
        for value_id in dict.fromkeys(node.inputs):
            self._graph.values[value_id].users.append(node.id)
        self._graph.nodes.append(node)

    def finish(self) -> IRGraph:
        """The graph."""
        return self._graph


# --- what is worth a copy -------------------------------------------------------------------------


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
