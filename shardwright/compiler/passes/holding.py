"""How many bytes values hold while a graph runs, and what it costs to do nodes later, together.

Comes in: a graph. Goes out: pieces of groups of its nodes. What always holds: where a piece is done
as one, at the place of its last node, its nodes do not wait for others in between where more would
be held then than is anywhere in the graph. What waiting nodes read is held until they are done;
what they make is not there before.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from shardwright.costs.views import moves_nothing
from shardwright.ir import IRGraph, IRNode


class Holding:
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
