"""From slots to tasks: runs of nodes between communications become graphs.

Comes in: what each slot does, in order. Goes out: one list of `Segment`s and communications for all
slots, in an order that every slot can follow: a communication stands behind the segments that its
members run before it. A run of nodes ends at a communication and where one repeated layer meets the
next, so that equal layers give equal text and share it in the file. What always holds: a segment
reads only stored values, inputs, and what its slot made or received before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.ir import IRGraph, IRNode
from shardwright.transform.slots import Border, Communication, Localized, SlotGraph


@dataclass(frozen=True, slots=True)
class Segment:
    """Nodes of one slot that become one compute task, the values they read and those they give.

    Positions, not names, decide the order of both, so that equal layers give equal tasks.
    """

    name: str
    device: str
    nodes: tuple[IRNode, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


Task = Segment | Communication


def tasks(localized: Localized) -> list[Task]:
    """Segments and communications of all slots, in an order that can be executed."""
    wanted = _wanted(localized)
    queues = {device: _Queue(slot, wanted[device]) for device, slot in localized.slots.items()}
    found: list[Task] = []
    for communication in localized.communications:
        for member in communication.members:
            found += queues[member.device].until(communication)
        found.append(communication)
    for queue in queues.values():
        found += queue.until(None)
    return found


def _wanted(localized: Localized) -> dict[str, set[int]]:
    """For each slot, the values that leave it: given away, outputs, or new contents."""
    wanted: dict[str, set[int]] = {device: set() for device in localized.slots}
    for communication in localized.communications:
        for member in communication.members:
            if member.gives is not None:
                wanted[member.device].add(member.gives)
    ends = [part for parts in localized.outputs for part in parts]
    for part in (*ends, *(new for _, new in localized.updates)):
        wanted[part.device].add(part.value)
    return wanted


@dataclass(slots=True)
class _Queue:
    """The segments of one slot, handed out up to a communication at a time."""

    slot: SlotGraph
    wanted: set[int]
    at: int = 0
    count: int = 0

    def until(self, communication: Communication | None) -> Iterator[Segment]:
        """The segments before a communication, or all that are left; goes past it."""
        run: list[IRNode] = []
        items = self.slot.items
        while self.at < len(items):
            item = items[self.at]
            self.at += 1
            if isinstance(item, IRNode):
                run.append(item)
                continue
            yield from self._segment(run)
            run = []
            if not isinstance(item, Border):
                assert item is communication, "members meet communications in one order"
                return
        yield from self._segment(run)

    def _segment(self, run: list[IRNode]) -> Iterator[Segment]:
        if run:
            graph = self.slot.builder.graph
            name = f"{self.slot.device}.{self.count}"
            self.count += 1
            outputs = tuple(self._escaping(graph, run))
            yield Segment(name, self.slot.device, tuple(run), tuple(_reads(run)), outputs)

    def _escaping(self, graph: IRGraph, run: list[IRNode]) -> list[int]:
        """What a run makes that is read after it, in the order it makes it."""
        inside = {node.id for node in run}
        return [
            value_id
            for node in run
            for value_id in node.outputs
            if value_id in self.wanted or not inside.issuperset(graph.values[value_id].users)
        ]


def _reads(run: list[IRNode]) -> list[int]:
    """What a run reads from outside, in the order in which it first does."""
    made: set[int] = set()
    read: dict[int, None] = {}
    for node in run:
        read.update(dict.fromkeys(v for v in node.inputs if v not in made))
        made.update(node.outputs)
    return list(read)
