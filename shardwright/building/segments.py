"""From slots to tasks: runs of nodes between communications become graphs.

Input: what each slot does, in order, and when. Output: one list of `ComputeSegment`s and
`CommunicationSegment`s for all slots, phase after phase, in an order that every slot can follow: a
communication stands behind the segments that its members run before it. A run of nodes is of one
place; it ends at a communication of that place and where one repeated layer meets the next, so that
equal layers give equal text and share it in the file.

Where weight gradients are to stand apart, segments of the phase ``backward`` make only what other
slots and stages wait for. What nobody waits for before the update is one segment a layer, of the
phase ``backward_weight``, which stands behind the layer's communications.

Invariant: a segment reads only stored values, inputs, and what its slot made or received
before; what nobody reads is not made, sent or received.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from shardwright.autodiff.backward import split_backward
from shardwright.building.slots import (
    Border,
    Live,
    LocalCommunication,
    Localized,
    PhaseStage,
    SlotGraph,
    live_parts,
)
from shardwright.ir import IRGraph, IRNode

ORDER = ("prepare", "forward", "backward", "update")
"""The phases of a step as they stand in a file; weight gradients stand among the backward."""
_RANKS = {None: 0, "backward_weight": 2} | {phase: i for i, phase in enumerate(ORDER)}
_LETTERS = {"prepare": "P", "forward": "F", "backward": "B", "backward_weight": "W", "update": "U"}


@dataclass(frozen=True, slots=True)
class ComputeSegment:
    """Nodes of one slot that become one compute task, the values they read and those they give.

    Positions, not names, decide the order of both, so that equal layers give equal tasks.
    """

    name: str
    device: str
    nodes: tuple[IRNode, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    place: PhaseStage


@dataclass(frozen=True, slots=True)
class CommunicationSegment:
    """A communication, and the place of each member's part in it."""

    communication: LocalCommunication
    places: tuple[PhaseStage, ...]


Task = ComputeSegment | CommunicationSegment


def tasks(localized: Localized, *, weights_apart: bool = True) -> list[Task]:
    """Segments and communications of all slots, in an order that can be executed.

    Without ``weights_apart`` the backward is not split.
    """
    live = live_parts(localized)
    steps = {device: _steps(slot, live[device]) for device, slot in localized.slots.items()}
    if weights_apart and any(_others_wait(found) for found in steps.values()):
        steps = {
            device: list(_weights_apart(found, localized.slots[device], live[device]))
            for device, found in steps.items()
        }
    queues = {device: _Queue(device, found, live[device]) for device, found in steps.items()}
    found: list[Task] = []
    for communication in localized.communications:
        members = [member.device for member in communication.members]
        if communication in live[members[0]].communications:
            for device in members:
                found += queues[device].until(communication)
            places = tuple(queues[device].place for device in members)
            found.append(CommunicationSegment(communication, places))
    for queue in queues.values():
        found += queue.until(None)
    return sorted(found, key=_rank)


def _rank(task: Task) -> int:
    """Where a task's phase stands in the file: a message with the last of its members."""
    places = (task.place,) if isinstance(task, ComputeSegment) else task.places
    return max(_RANKS[place.phase] for place in places)


class _Queue:
    """The segments of one slot, handed out up to a communication at a time.

    ``place`` is that of the last communication.
    """

    def __init__(self, device: str, steps: Sequence[_Step], live: Live) -> None:
        self.device = device
        self.place = PhaseStage()
        self._steps = deque(steps)
        self._leaving = live.wanted.union(*(step.read for step in steps))
        self._counts: Counter[PhaseStage] = Counter()

    def until(self, communication: LocalCommunication | None) -> Iterator[ComputeSegment]:
        """The segments before a communication, or all that are left; goes past it."""
        while self._steps:
            step = self._steps.popleft()
            if isinstance(step, _CommunicationItem):
                assert step.communication is communication, "all meet in one order"
                self.place = step.place
                return
            if isinstance(step, _NodeRun):
                yield self._segment(step)

    def _segment(self, run: _NodeRun) -> ComputeSegment:
        made = [value_id for node in run.nodes for value_id in node.outputs]
        outputs = tuple(value_id for value_id in made if value_id in self._leaving)
        inputs, name = tuple(run.read), self._name(run.place)
        return ComputeSegment(name, self.device, tuple(run.nodes), inputs, outputs, run.place)

    def _name(self, place: PhaseStage) -> str:
        """``d0.3``; in a training step ``d0.F1.3``, of phase and stage."""
        count = self._counts[place]
        self._counts[place] += 1
        if place.phase is None:
            return f"{self.device}.{count}"
        stage = "" if place.stage is None else place.stage
        return f"{self.device}.{_LETTERS[place.phase]}{stage}.{count}"


# --- the steps of one slot ------------------------------------------------------------------------


@dataclass(slots=True)
class _NodeRun:
    """Nodes of one place that become one task."""

    place: PhaseStage
    nodes: list[IRNode] = field(default_factory=list)

    @property
    def read(self) -> list[int]:
        """What it reads from outside, in the order in which it first does."""
        made: set[int] = set()
        read: dict[int, None] = {}
        for node in self.nodes:
            read.update(dict.fromkeys(v for v in node.inputs if v not in made))
            made.update(node.outputs)
        return list(read)


@dataclass(frozen=True, slots=True)
class _CommunicationItem:
    """A slot's part in a communication: what it gives is what it reads."""

    communication: LocalCommunication
    place: PhaseStage
    read: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _LayerEnd:
    """One repeated layer of a place ends."""

    place: PhaseStage
    read: tuple[int, ...] = ()


_Step = _NodeRun | _CommunicationItem | _LayerEnd


def _steps(slot: SlotGraph, live: Live) -> list[_Step]:
    """What a slot does: whole runs and communications, each behind what it reads."""
    cutter = _Cutter()
    for item, place in zip(slot.items, slot.places, strict=True):
        if isinstance(item, Border):
            cutter.close(place)
            cutter.steps.append(_LayerEnd(place))
        elif isinstance(item, IRNode):
            if item.id in live.nodes:
                cutter.add(item, place)
        elif item in live.communications:
            cutter.meet(_CommunicationItem(item, place, item.given_by(slot.device)))
    cutter.close_all()
    return cutter.steps


@dataclass(slots=True)
class _Cutter:
    """Cuts the items of a slot in runs; runs of several places may be open at once."""

    steps: list[_Step] = field(default_factory=list)
    open: dict[PhaseStage, _NodeRun] = field(default_factory=dict)
    makers: dict[int, _NodeRun] = field(default_factory=dict)
    """The run that makes a value."""

    def add(self, node: IRNode, place: PhaseStage) -> None:
        """Put a node at the end of its place's run."""
        run = self.open.setdefault(place, _NodeRun(place))
        run.nodes.append(node)
        self.makers.update(dict.fromkeys(node.outputs, run))

    def meet(self, call: _CommunicationItem) -> None:
        """A communication ends the run of its place, and the one that makes what it gives."""
        self.close(call.place)
        self._make(call.read)
        self.steps.append(call)

    def close(self, place: PhaseStage) -> None:
        """End the run of a place, behind those that it reads from."""
        run = self.open.pop(place, None)
        if run is not None:
            self._make(run.read)
            self.steps.append(run)

    def _make(self, value_ids: Iterable[int]) -> None:
        """End the runs that make these values, where they are open."""
        for value_id in value_ids:
            run = self.makers.get(value_id)
            if run is not None and self.open.get(run.place) is run:
                self.close(run.place)

    def close_all(self) -> None:
        """End all runs."""
        for place in list(self.open):
            self.close(place)


# --- backward runs --------------------------------------------------------------------------------


def _others_wait(steps: Sequence[_Step]) -> bool:
    """Whether a slot gives anything away in its backward."""
    calls = (step for step in steps if isinstance(step, _CommunicationItem))
    return any(call.place.phase == "backward" and call.read for call in calls)


def _weights_apart(steps: Sequence[_Step], slot: SlotGraph, live: Live) -> Iterator[_Step]:
    """The steps with what nobody waits for taken out of backward runs, one run a layer for it."""
    parts = _parts(steps, slot.builder.graph)
    waiting: dict[PhaseStage, _NodeRun] = {}
    for step in steps:
        if isinstance(step, _LayerEnd) and step.place in waiting:
            yield waiting.pop(step.place)
        if id(step) not in parts:
            yield step
            continue
        early, late = parts[id(step)]
        weights = [node for node in late if not live.values.isdisjoint(node.outputs)]
        if early:
            yield _NodeRun(step.place, early)
        if weights:
            place = replace(step.place, phase="backward_weight")
            waiting.setdefault(step.place, _NodeRun(place)).nodes += weights
    yield from waiting.values()


def _parts(steps: Sequence[_Step], graph: IRGraph) -> dict[int, tuple[list[IRNode], list[IRNode]]]:
    """For each backward run, by identity, what others wait for, and the rest.

    Others are the members of communications, and other stages of the slot.
    """
    runs = [step for step in steps if isinstance(step, _NodeRun) and step.place.phase == "backward"]
    homes = {v: run.place for run in runs for node in run.nodes for v in node.outputs}
    found: dict[int, tuple[list[IRNode], list[IRNode]]] = {}
    needed: set[int] = set()
    for step in reversed(steps):
        if step.place.phase != "backward":
            continue
        if not isinstance(step, _NodeRun):
            needed.update(step.read)
            continue
        early, late = split_backward(graph, step.nodes, needed)
        found[id(step)] = early, late
        needed.update(value_id for node in early for value_id in node.inputs)
        elsewhere = (v for v in step.read if homes.get(v, step.place) != step.place)
        needed.update(elsewhere)
    return found
