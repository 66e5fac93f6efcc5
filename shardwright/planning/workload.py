"""What partitioners deal out: nodes with their seconds, and what flows between them.

Input: the forward of a graph (`forward_view`), what nodes cost, and the links between slots.
Output: a `Workload`, which knows positions and numbers and nothing of operators. Invariant: nodes
stand in a topological order, so that a value's maker comes before its readers.

What a set of nodes costs as a stage depends on the set alone: the seconds of its nodes; those of
what it reads from outside; and those of what others read of it, each value once. Where a graph is
trained, the gradient of a value takes the way back, at the same price (Tarnawski et al., "Efficient
Algorithms for Device Placement of DNN Graph Operators", 2020, count the same way).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from shardwright.autodiff.needed import needing_gradients, trained_parameters
from shardwright.clusters import Links
from shardwright.costs import Costs
from shardwright.costs.placed import saved_for_backward, view_bases
from shardwright.costs.roofline import FREE
from shardwright.ir import IRGraph, IRNode
from shardwright.ir.operators import resolve
from shardwright.planning.plan import label_of


class SentValue(NamedTuple):
    """A value that a node makes and others read; both are positions, readers ascending.

    ``seconds`` and ``nbytes`` are those of all its messages to one reader: of its gradient too,
    where it has one. ``kept`` are the bytes that a slot that makes it holds from its forward to its
    backward, a microbatch's; ``arrived`` those of a slot that receives it.
    """

    maker: int
    readers: tuple[int, ...]
    seconds: float
    nbytes: int
    kept: int = 0
    arrived: int = 0


class StoredValue(NamedTuple):
    """A stored value: its readers' positions, and the bytes that a slot holds because of it."""

    readers: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Workload:
    """Nodes to deal out.

    names
        Where each node stands and what it does, for messages.
    seconds
        Of each node, for one microbatch: its forward, and its backward where it is trained.
    sent, stored
        What flows between nodes, and what they read that exists before.
    repeatable
        Nodes that may be done again where they are read: views, numbers, and what is made of inputs
        and buffers alone.
    """

    names: tuple[str, ...]
    seconds: tuple[float, ...]
    sent: tuple[SentValue, ...] = ()
    stored: tuple[StoredValue, ...] = ()
    repeatable: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.seconds)

    @cached_property
    def successors(self) -> list[list[int]]:
        """The nodes that read what each node makes, ascending."""
        found: list[set[int]] = [set() for _ in self.seconds]
        for value in self.sent:
            found[value.maker].update(value.readers)
        return [sorted(nodes) for nodes in found]

    @cached_property
    def predecessors(self) -> list[list[int]]:
        """The nodes that make what each node reads, ascending."""
        found: list[list[int]] = [[] for _ in self.seconds]
        for node, readers in enumerate(self.successors):
            for reader in readers:
                found[reader].append(node)
        return found

    @cached_property
    def anchors(self) -> list[int]:
        """The nodes that read stored values."""
        return sorted({reader for value in self.stored for reader in value.readers})

    def is_hollow(self, stages: Sequence[int]) -> bool:
        """Whether a stage reads nothing stored: it has next to nothing to do."""
        return len({stages[node] for node in self.anchors}) <= max(stages, default=-1)

    def shared(self, slots: int, shards: int = 1) -> Workload:
        """What one of a rank's slots carries where they share all nodes evenly.

        They are in so many shards of the batch, each of which holds all of the stored values.
        """
        return replace(
            self,
            seconds=tuple(seconds / slots for seconds in self.seconds),
            sent=tuple(
                value._replace(
                    seconds=value.seconds / shards,
                    kept=value.kept // slots,
                    arrived=value.arrived // slots,
                )
                for value in self.sent
            ),
            stored=tuple(
                value._replace(nbytes=value.nbytes * shards // slots) for value in self.stored
            ),
        )


def workload_of(
    view: IRGraph,
    costs: Costs,
    links: Links,
    *,
    step: IRGraph | None = None,
    held: Mapping[int, int] | None = None,
    first: int = 0,
) -> Workload:
    """The workload of a forward, without its ``first`` nodes, which are done once a step.

    ``step`` is the training step whose forward it is; None of a model that is not trained. ``held``
    says what a slot holds for a stored value of which that is not its own bytes: its gradient and
    its optimizer's state too.
    """
    nodes = view.nodes[first:]
    position = {node.id: i for i, node in enumerate(nodes)}
    needing = set() if step is None else needing_gradients(step, trained_parameters(step))
    return Workload(
        tuple(map(label_of, nodes)),
        tuple(_seconds(costs, view, node, step) for node in nodes),
        tuple(_sent(view, nodes, position, links, needing)),
        tuple(
            StoredValue(readers, (held or {}).get(value.id, value.nbytes))
            for value in view.stored()
            if (readers := tuple(position[user] for user in value.users if user in position))
        ),
        frozenset(_repeatable(view, nodes, needing)),
    )


def _seconds(costs: Costs, view: IRGraph, node: IRNode, step: IRGraph | None) -> float:
    return costs.node(view, node).forward if step is None else costs.node(step, node).total


def _sent(
    view: IRGraph,
    nodes: Sequence[IRNode],
    position: Mapping[int, int],
    links: Links,
    needing: set[int],
) -> Iterator[SentValue]:
    read, bases = _read_by_backward(view, nodes, needing)
    for node in nodes:
        for value in (view.values[v] for v in node.outputs if view.values[v].users):
            times = 2 if value.id in needing else 1
            yield SentValue(
                position[node.id],
                tuple(sorted({position[user] for user in value.users})),
                times * links.seconds("send", 2, value.nbytes),
                times * value.nbytes,
                value.nbytes if value.id in bases else 0,
                value.nbytes if value.id in bases or value.id in read else 0,
            )


def _read_by_backward(
    view: IRGraph, nodes: Sequence[IRNode], needing: set[int]
) -> tuple[set[int], set[int]]:
    """What backwards read of the forward, and that with each view as what it is a view of."""
    as_read: dict[int, int] = {}
    read = {v for node in nodes for v in saved_for_backward(view, node, needing, as_read)}
    bases = view_bases(view)
    return read, {bases.get(value_id, value_id) for value_id in read}


def _repeatable(view: IRGraph, nodes: Sequence[IRNode], needing: set[int]) -> Iterator[int]:
    """The nodes that give the same again, and are worth asking whether to do so."""
    fixed = set(view.inputs) | {
        value.id for value in view.stored() if value.role != "param" and value.id not in needing
    }
    for position, node in enumerate(nodes):
        if torch.Tag.nondeterministic_seeded in resolve(node.op).tags:
            continue
        made = [view.values[v] for v in node.outputs]
        read = [view.values[v] for v in node.inputs]
        alone = fixed.issuperset(node.inputs) and needing.isdisjoint(node.outputs)
        light = sum(v.nbytes for v in read if v.is_stored) <= sum(v.nbytes for v in made)
        if alone and light:
            fixed.update(node.outputs)
        number = all(value.numel == 1 for value in (*made, *read))
        if (alone and light) or number or node.op in FREE:
            yield position


# --- what each rank carries -----------------------------------------------------------------------
#
# The sums are those that `Shares.of` would work out anew.
#
# A rank carries the seconds of its nodes, those of what it receives, and those of what it sends,
# each value once. It holds the stored values that its nodes read, each once.


@dataclass(slots=True)
class Shares:
    """Sums by rank.

    ``sent`` are the seconds and ``crossing`` the bytes of all messages; ``kept`` is what a rank
    holds of one microbatch from its forward to its backward.
    """

    workload: Workload
    stages: list[int]
    ranks: Sequence[int]
    nodes: list[int]
    """How many nodes each stage has."""
    work: list[float]
    """Seconds of nodes alone."""
    seconds: list[float]
    stored: list[float]
    kept: list[float]
    sent: float
    crossing: int
    _touching: list[list[int]]
    """Which values each node makes or reads."""
    _held: list[list[int]]
    """Which stored values each node reads."""
    _readers: list[Counter[int]]
    """How many readers of each stored value a rank has."""

    @classmethod
    def of(cls, workload: Workload, stages: Sequence[int], ranks: Sequence[int]) -> Shares:
        """The shares of nodes in these stages, on these ranks."""
        count = max(ranks, default=-1) + 1
        found = cls(
            workload,
            list(stages),
            ranks,
            [0] * len(ranks),
            [0.0] * count,
            [0.0] * count,
            [0.0] * count,
            [0.0] * count,
            0.0,
            0,
            [[] for _ in stages],
            [[] for _ in stages],
            [Counter() for _ in workload.stored],
        )
        found._begin()
        return found

    def _begin(self) -> None:
        for node, stage in enumerate(self.stages):
            self.nodes[stage] += 1
            self._work(self.ranks[stage], self.workload.seconds[node])
        for number, value in enumerate(self.workload.sent):
            for node in (value.maker, *value.readers):
                self._touching[node].append(number)
            self._count(value, 1)
        for number, stored in enumerate(self.workload.stored):
            for node in stored.readers:
                self._held[node].append(number)
                self._read(number, self.rank(node), 1)

    def rank(self, node: int) -> int:
        """The rank that does a node."""
        return self.ranks[self.stages[node]]

    def move(self, node: int, stage: int) -> None:
        """Put a node in another stage."""
        before, after = self.rank(node), self.ranks[stage]
        self.nodes[self.stages[node]] -= 1
        self.nodes[stage] += 1
        if before == after:
            self.stages[node] = stage
            return
        touched = [self.workload.sent[number] for number in self._touching[node]]
        for value in touched:
            self._count(value, -1)
        self.stages[node] = stage
        for value in touched:
            self._count(value, 1)
        for number in self._held[node]:
            self._read(number, before, -1)
            self._read(number, after, 1)
        self._work(before, -self.workload.seconds[node])
        self._work(after, self.workload.seconds[node])

    def _work(self, rank: int, seconds: float) -> None:
        self.work[rank] += seconds
        self.seconds[rank] += seconds

    def _count(self, value: SentValue, sign: int) -> None:
        """Add or take away what the messages of a value cost, and what is kept of it."""
        maker = self.rank(value.maker)
        self.kept[maker] += sign * value.kept
        receivers = set(self._receivers(value, maker))
        for rank in receivers:
            self.seconds[rank] += sign * value.seconds
            self.kept[rank] += sign * value.arrived
        if receivers:
            self.seconds[maker] += sign * value.seconds
        self.sent += sign * value.seconds * len(receivers)
        self.crossing += sign * value.nbytes * len(receivers)

    def _receivers(self, value: SentValue, maker: int) -> Iterator[int]:
        return (rank for rank in map(self.rank, value.readers) if rank != maker)

    def _read(self, number: int, rank: int, sign: int) -> None:
        """Count a reader of a stored value; the rank holds it while it has one."""
        counts, before = self._readers[number], self._readers[number][rank]
        counts[rank] += sign
        if not before or not counts[rank]:
            self.stored[rank] += sign * self.workload.stored[number].nbytes
