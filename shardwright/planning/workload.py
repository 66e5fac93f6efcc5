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

from shardwright.autodiff.needed import needing_gradients, trained_parameters
from shardwright.clusters import Links
from shardwright.costs import Costs
from shardwright.costs.placed import saved_for_backward, view_bases
from shardwright.ir import IRGraph, IRNode
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
    """

    names: tuple[str, ...]
    seconds: tuple[float, ...]
    sent: tuple[SentValue, ...] = ()
    stored: tuple[StoredValue, ...] = ()

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


# --- what each rank carries -----------------------------------------------------------------------
#
# A rank carries the seconds of its nodes, those of what it receives, and those of what it sends,
# each value once. It holds the stored values that its nodes read, each once.


@dataclass(frozen=True, slots=True)
class Shares:
    """Sums by rank; ``ranks`` has that of each stage, ``nodes`` how many nodes each stage has.

    ``work`` are seconds of nodes alone, ``seconds`` those with messages; ``sent`` are the seconds
    and ``crossing`` the bytes of all messages; ``kept`` is what a rank holds of one microbatch from
    its forward to its backward.
    """

    ranks: Sequence[int]
    nodes: Sequence[int]
    work: Sequence[float]
    seconds: Sequence[float]
    stored: Sequence[float]
    kept: Sequence[float]
    sent: float
    crossing: int

    @classmethod
    def of(cls, workload: Workload, stages: Sequence[int], ranks: Sequence[int]) -> Shares:
        """The shares of nodes in these stages, on these ranks."""
        at = [ranks[stage] for stage in stages]
        work, stored, kept = ([0.0] * (max(ranks, default=-1) + 1) for _ in range(3))
        for rank, taken in zip(at, workload.seconds, strict=True):
            work[rank] += taken
        seconds, sent, crossing = list(work), 0.0, 0
        for value in workload.sent:
            maker = at[value.maker]
            receivers = {at[reader] for reader in value.readers} - {maker}
            kept[maker] += value.kept
            for rank in receivers:
                kept[rank] += value.arrived
            for rank in receivers | {maker} if receivers else ():
                seconds[rank] += value.seconds
            sent += value.seconds * len(receivers)
            crossing += value.nbytes * len(receivers)
        for held in workload.stored:
            for rank in {at[reader] for reader in held.readers}:
                stored[rank] += held.nbytes
        nodes = Counter(stages)
        counts = [nodes[stage] for stage in range(len(ranks))]
        return cls(ranks, counts, work, seconds, stored, kept, sent, crossing)
