"""Pointwise fusion under a liveness bound, and recomputed producers.

`LivenessBound` divides nodes that would be done together, where waiting for one another would hold
more bytes than are held anywhere in the graph: what waiting nodes read is held until they are done.

`Recomputing` inlines what a kernel makes for later kernels alone into those, where that is cheap
and all that it reads is held until then anyway: less is held and never more, and a value is the
same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np

from shardwright.compiler.passes.pointwise_rules import Family
from shardwright.costs.roofline import moves_nothing
from shardwright.ir import IRGraph, IRNode, IRValue


class LivenessBound:
    """The bytes that are held while each node of a graph runs."""

    def __init__(self, graph: IRGraph) -> None:
        self._graph = graph
        self._place = {node.id: place for place, node in enumerate(graph.nodes)}
        self._root: dict[int, int] = {}
        for node in graph.nodes:
            if moves_nothing(graph, node):
                root = self._root.get(node.inputs[0], node.inputs[0])
                self._root.update(dict.fromkeys(node.outputs, root))
        self._last = self._ends()
        self.held = self._held_bytes()
        """Bytes by the place of the node, of what nodes make, without what is stored or given."""
        self.most = int(self.held.max(initial=0))
        """What nodes hold at most, each done by itself."""

    def pieces(self, nodes: Sequence[IRNode]) -> list[list[IRNode]]:
        """Nodes that are to be done as one, divided where that would hold more than is at most.

        What is decided for these nodes counts for those that come later.
        """
        pieces: list[list[IRNode]] = [[]]
        users = {node.id for node in nodes}
        for node in nodes:
            place = self._place[node.id]
            begin = self._place[pieces[-1][-1].id] + 1 if pieces[-1] else place
            if begin < place:
                meanwhile, then = self._more(pieces[-1], place, users)
                most = self.held[begin:place].max() + meanwhile
                if max(most, self.held[place] + then) > self.most:
                    pieces.append([])
                else:
                    self.held[begin : place + 1] += meanwhile
            pieces[-1].append(node)
        return pieces

    def _more(
        self, nodes: Sequence[IRNode], place: int, users: AbstractSet[int]
    ) -> tuple[int, int]:
        """How many bytes more are held before a place where nodes wait until then, and there.

        What they make is not there before, and there not at all if none but ``users`` read it.
        """
        made = {value_id for node in nodes for value_id in node.outputs}
        read = {self._root_of(v) for node in nodes for v in node.inputs if v not in made}
        waiting = sum(self._size(v) for v in read if self._last.get(v, place) < place)
        later = [v for v in made if self._last[self._root_of(v)] >= place]
        inner = [v for v in later if users >= set(self._graph.values[v].users)]
        return (
            waiting - sum(map(self._size, later)),
            waiting - sum(map(self._size, inner)),
        )

    def _root_of(self, value_id: int) -> int:
        return self._root.get(value_id, value_id)

    def _size(self, value_id: int) -> int:
        return self._graph.values[value_id].nbytes

    def _ends(self) -> dict[int, int]:
        """The place of the last node that reads each root's memory, of those that nodes make."""
        graph, last = self._graph, dict[int, int]()
        for place, node in enumerate(graph.nodes):
            for value_id in (*node.inputs, *node.outputs):
                last[self._root_of(value_id)] = place
        for value_id in (*graph.outputs, *graph.updates.values()):
            last[self._root_of(value_id)] = len(graph.nodes)
        return {v: end for v, end in last.items() if graph.values[v].producer is not None}

    def _held_bytes(self) -> np.ndarray:
        change = np.zeros(len(self._graph.nodes) + 2, dtype=np.int64)
        for value_id, end in self._last.items():
            producer = self._graph.values[value_id].producer
            assert producer is not None
            change[self._place[producer]] += self._size(value_id)
            change[end + 1] -= self._size(value_id)
        return np.cumsum(change)[:-2]


# --- recomputed producers -------------------------------------------------------------------------


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
class ChainNodes:
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
        can: Callable[[ChainNodes, Collection[int]], bool],
    ) -> None:
        self.chains = [ChainNodes(nodes) for nodes in chains]
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
        trials: dict[int, ChainNodes] = {}
        for user in users:
            trial = self._with(value, maker, user)
            if trial is None or not self._can(trial, dropped):
                return
            trials[user] = trial
        self.dropped = dropped
        for user, trial in trials.items():
            self.chains[user] = trial
            self._borrowed.update(self._reads(trial.again))

    def _with(self, value: IRValue, maker: int, user: int) -> ChainNodes | None:
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
        return ChainNodes(done.nodes, sorted(found.values(), key=lambda node: self._place[node.id]))

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
