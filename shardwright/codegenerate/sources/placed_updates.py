"""Buffers that change: who reads the old contents, and who makes the new ones, in one partition.

Comes in: nodes with their partitions. Goes out: the same, with some nodes in another partition, so
that the new contents of a buffer are there in the first partition that reads the old ones. What
always holds: no node needs what a later partition makes, if none did before; layers of the model
stay where they are, since what is moved reads no parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardwright.errors import CodegenError
from shardwright.ir import IRGraph, IRNode
from shardwright.ir.execute import describe_node


@dataclass(slots=True, eq=False)
class Placed:
    """A node and its partition."""

    node: IRNode
    number: int


def first_readers(graph: IRGraph, placed: Iterable[Placed]) -> dict[int, int]:
    """The first partition that reads each stored value that changes."""
    readers: dict[int, int] = {}
    for found in placed:
        for value_id in found.node.inputs:
            if value_id in graph.updates:
                readers[value_id] = min(found.number, readers.get(value_id, found.number))
    return readers


def together(graph: IRGraph, placed: Sequence[Placed]) -> None:
    """Move nodes so that buffers change where they are first read.

    What reads one waits for what changes it where it can, else that is done earlier. Raises
    CodegenError where layers of the model stand between them.
    """
    if graph.updates:
        moving = _Moving(graph, placed)
        for old, new in graph.updates.items():
            moving.settle(old, new)


class _Moving:
    """Moves nodes with all that they read, or with all that reads them."""

    def __init__(self, graph: IRGraph, placed: Sequence[Placed]) -> None:
        self.graph = graph
        self.makers = {value_id: found for found in placed for value_id in found.node.outputs}
        self.readers: dict[int, list[Placed]] = {}
        for found in placed:
            for value_id in dict.fromkeys(found.node.inputs):
                self.readers.setdefault(value_id, []).append(found)

    def settle(self, old: int, new: int) -> None:
        """Bring what reads old contents and what makes new ones together."""
        maker, readers = self.makers.get(new), self.readers.get(old, [])
        first = min(readers, key=lambda found: found.number, default=None)
        if maker is None or first is None or maker.number <= first.number:
            return
        early, late = first.number, maker.number
        waiting = self._reached(readers, self._users, lambda number: number < late)
        if waiting is not None:
            for found in waiting:
                found.number = late
            return
        earlier = self._reached([maker], self._sources, lambda number: number > early)
        if earlier is None:
            raise CodegenError(
                f"partition {early} reads the buffer {self.graph.values[old].name!r}, and its new "
                f"contents are made by {describe_node(maker.node)} in partition {late}, with "
                "layers of the model between; plan so that one partition has both"
            )
        for found in earlier:
            found.number = early

    def _reached(
        self,
        starts: Iterable[Placed],
        following: Callable[[Placed], Iterator[Placed]],
        beyond: Callable[[int], bool],
    ) -> list[Placed] | None:
        """What must move along with some nodes; None where a layer is among it."""
        found: dict[Placed, None] = {}
        pending = list(starts)
        while pending:
            placed = pending.pop()
            if placed in found or not beyond(placed.number):
                continue
            if any(self.graph.values[v].role == "param" for v in placed.node.inputs):
                return None
            found[placed] = None
            pending += following(placed)
        return list(found)

    def _users(self, placed: Placed) -> Iterator[Placed]:
        for value_id in placed.node.outputs:
            yield from self.readers.get(value_id, ())

    def _sources(self, placed: Placed) -> Iterator[Placed]:
        for value_id in placed.node.inputs:
            if value_id in self.makers:
                yield self.makers[value_id]
