"""What a chain makes for later chains alone, done again by those instead of kept for them.

Comes in: chains, of which each is done as one, in order. Goes out: for each of them the nodes of
others that it does again, and the values that nobody stores any more. What always holds: a value is
done again only by cheap instructions, as steps of the same family, so that it is the same to the
last bit; all that this reads is held until then anyway, so that less is held and never more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.compiler.passes.families import Family
from shardwright.ir import IRGraph, IRNode, IRValue

_OF_TWO = ("add", "sub", "mul", "gt", "ge", "lt", "le", "eq", "ne")
_OTHERS = (
    *("neg.default", "abs.default", "relu.default", "square.default", "logical_not.default"),
    *("maximum.default", "minimum.default", "rsub.Scalar", "threshold_backward.default"),
    *("where.self", "where.ScalarOther", "where.ScalarSelf", "_to_copy.default"),
)
CHEAP = frozenset(
    f"aten.{name}"
    for name in (*(f"{op}.{kind}" for op in _OF_TWO for kind in ("Tensor", "Scalar")), *_OTHERS)
)
"""Operators of one quick instruction, which takes less than it does to store its result."""


@dataclass(frozen=True, slots=True)
class Done:
    """A chain's own nodes, and those of others that it does again, both in the graph's order."""

    nodes: Sequence[IRNode]
    again: Sequence[IRNode] = field(default=())

    @property
    def every(self) -> list[IRNode]:
        """All that it does, in order."""
        return [*self.again, *self.nodes]


class Recomputing:
    """Decides for the chains of one graph.

    chains
        The nodes of each; afterwards what each does.
    families
        Of the chains' nodes, by id.
    kept
        Values that are read when all nodes are done.
    reads
        The values that nodes read of others, when they are done as one.
    can
        Whether a chain can do so much, where nobody stores some values.
    """

    def __init__(
        self,
        graph: IRGraph,
        chains: Iterable[Sequence[IRNode]],
        families: Mapping[int, Family],
        kept: Collection[int],
        reads: Callable[[Sequence[IRNode]], Collection[int]],
        can: Callable[[Done, Collection[int]], bool],
    ) -> None:
        self.chains = [Done(nodes) for nodes in chains]
        self.dropped: set[int] = set()
        """Values that no chain stores."""
        self._graph, self._families, self._kept = graph, families, kept
        self._reads, self._can = reads, can
        self._chain = {node.id: k for k, done in enumerate(self.chains) for node in done.nodes}
        self._place = {node.id: place for place, node in enumerate(graph.nodes)}
        self._borrowed: set[int] = set()
        """Values that chains read only for what they do again."""
        for maker, done in enumerate(self.chains):
            for node in done.nodes:
                self._try(graph.values[node.outputs[0]], maker)

    def _try(self, value: IRValue, maker: int) -> None:
        """Let all later chains that read a value do it again, if each of them can."""
        users = {self._chain.get(user, -1) for user in value.users} - {maker}
        if not users or -1 in users or value.id in self._kept or value.id in self._borrowed:
            return
        dropped = {*self.dropped, value.id}
        if not self._can(self.chains[maker], dropped):
            return
        trials: dict[int, Done] = {}
        for user in users:
            trial = self._with(value, maker, user)
            if trial is None or not self._can(trial, dropped):
                return
            trials[user] = trial
        self.dropped = dropped
        for user, trial in trials.items():
            self.chains[user] = trial
            self._borrowed.update(self._reads(trial.again))

    def _with(self, value: IRValue, maker: int, user: int) -> Done | None:
        """A chain that does the value again too; None where that is not cheap, or holds more."""
        done = self.chains[user]
        made = {node.outputs[0]: node for node in self.chains[maker].nodes}
        found = {node.outputs[0]: node for node in done.again}
        read = {*self._reads(done.every)} - {value.id}
        family = self._families[done.nodes[0].id]
        waiting = [value.id]
        while waiting:
            value_id = waiting.pop()
            if value_id in found or (
                value_id != value.id and self._is_held(value_id, read, done.nodes[-1])
            ):
                continue
            node = made.get(value_id)
            if node is None or not self._is_cheap(node, family):
                return None
            found[value_id] = node
            waiting += node.inputs
        return Done(done.nodes, sorted(found.values(), key=lambda node: self._place[node.id]))

    def _is_cheap(self, node: IRNode, family: Family) -> bool:
        """Whether a chain of a family may do a node again, which rounds as it did."""
        dtype = self._graph.values[node.outputs[0]].dtype
        alike = self._families[node.id] == family and dtype in (family.wide, "bool")
        return alike and node.op in CHEAP

    def _is_held(self, value_id: int, read: Collection[int], user: IRNode) -> bool:
        """Whether a value is in memory until a node is done, whatever that reads besides."""
        value, place = self._graph.values[value_id], self._place[user.id]
        if value.producer is None or value_id in self._kept or value_id in read:
            return True
        if value_id in self.dropped:
            return False
        maker = self._chain.get(value.producer)  # which stores nothing for itself
        return any(
            self._place[reader] >= place
            for reader in value.users
            if maker is None or self._chain.get(reader) != maker
        )
