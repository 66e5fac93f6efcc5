"""The rules of a file's schedule: that the step of a training pipeline comes to its end.

What is left is the order of
work that follows from the file and its schedule together: each slot does its supertasks action by
action. Shown is that a supertask finds what it reads made before, and that no slot waits for ever:
the step is gone through communication by communication, where a send waits for nobody, a recv for
its send, and every other kind for all members of its group. Where that comes to a standstill every
order does, since what can go on stays able to.

Time is linear in the communications of one step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwright.errors import PipelineError, ScheduleError
from shardwright.pipeline.connections import Connections
from shardwright.pipeline.rules import broken
from shardwright.pipeline.schedule_file import schedule_of
from shardwright.pipeline.schema import Document, Phase
from shardwright.schedules.schedule import Action, Schedule, Work

_PHASES: dict[Work, Phase] = {"F": "forward", "B": "backward", "W": "backward_weight"}
_KINDS: dict[str | None, Work] = {phase: kind for kind, phase in _PHASES.items()}


def check_schedule(document: Document, connections: Connections) -> None:
    """Raise PipelineError where slots cannot work as the schedule says; other rules hold already.

    ``rule`` is a key of `pipeline.rules.RULES`; ``task`` and ``tensor`` say where.
    """
    if document.training is None or document.training.schedule is None:
        return
    try:
        schedule = schedule_of(document.training)
    except ScheduleError as error:
        raise broken("schedule", str(error)) from None
    _check_reads(document, connections, schedule)
    _check_deadlock(document, connections, schedule)


def phases_of(schedule: Schedule, kind: Work) -> tuple[Phase, ...]:
    """The phases of which an action does the supertasks, one after another."""
    whole = kind == "B" and not schedule.splits_backward
    return ("backward", "backward_weight") if whole else (_PHASES[kind],)


# --- what is read is there ------------------------------------------------------------------------


class _Read(NamedTuple):
    """A supertask reads a tensor that another of its slot makes."""

    producer: str
    reader: str
    tensor: str


def _check_reads(document: Document, connections: Connections, schedule: Schedule) -> None:
    """Each action comes behind those that make what its supertasks read."""
    places = {
        action: position for actions in schedule.actions for position, action in enumerate(actions)
    }
    for (made, read), example in _reads(document, connections, schedule).items():
        for microbatch in range(schedule.microbatches):
            before, after = Action(*made, microbatch), Action(*read, microbatch)
            if places[before] > places[after]:
                raise broken(
                    "schedule-order",
                    f"{example.producer!r} makes the tensor in {before}, which the schedule "
                    f"{schedule.kind} does after {after}",
                    task=example.reader,
                    tensor=example.tensor,
                )


def _reads(
    document: Document, connections: Connections, schedule: Schedule
) -> dict[tuple[tuple[Work, int], tuple[Work, int]], _Read]:
    """The kinds and stages between which slots keep tensors, each with an example."""
    found: dict[tuple[tuple[Work, int], tuple[Work, int]], _Read] = {}
    for tensor, users in connections.users.items():
        producer = connections.producers.get(tensor, [""])[0]
        made = _action(document, schedule, producer) if producer else None
        for user in users:
            read = _action(document, schedule, user)
            if made is not None and read is not None and made != read:
                found.setdefault((made, read), _Read(producer, user, tensor))
    return found


def _action(document: Document, schedule: Schedule, name: str) -> tuple[Work, int] | None:
    """The kind and stage of the actions that do a supertask; None where it is done once a step."""
    task = document.supertasks[name]
    kind = _KINDS.get(task.phase)
    if kind is None or task.stage is None:
        return None
    return ("B" if kind == "W" and not schedule.splits_backward else kind), task.stage


# --- nobody waits for ever ------------------------------------------------------------------------


class _Visit(NamedTuple):
    """A slot does its part in a communication, for a microbatch or once a step."""

    task: str
    microbatch: int | None


def _check_deadlock(document: Document, connections: Connections, schedule: Schedule) -> None:
    """All slots come to the end of the step."""
    walk = _ScheduleWalk(document, connections)
    for device in document.devices:
        walk.visits[device] = list(_visits(document, connections, schedule, device))
    stuck = walk.run()
    if stuck:
        raise _deadlock(document, connections, stuck)


def _visits(
    document: Document, connections: Connections, schedule: Schedule, device: str
) -> Iterator[_Visit]:
    """The communications of a slot in the order in which it comes to them."""
    assert document.training is not None
    assert document.training.schedule is not None
    slots = document.training.schedule.slots
    rank = next(rank for rank, devices in enumerate(slots) if device in devices)
    places: dict[tuple[Phase | None, int | None], list[str]] = {}
    for name in connections.order[device]:
        task = document.supertasks[name]
        if task.group is not None:
            places.setdefault((task.phase, task.stage), []).append(name)
    yield from (_Visit(name, None) for name in places.get(("prepare", None), ()))
    for action in schedule.actions[rank]:
        for phase in phases_of(schedule, action.kind):
            for name in places.get((phase, action.stage), ()):
                yield _Visit(name, action.microbatch)
    yield from (_Visit(name, None) for name in places.get(("update", None), ()))


Moment = tuple[str | None, int | None]
"""A group, and the microbatch for which it communicates."""


@dataclass(slots=True)
class _ScheduleWalk:
    """Takes the slots through the communications of a step."""

    document: Document
    connections: Connections
    visits: dict[str, list[_Visit]] = field(default_factory=dict)
    at: dict[str, int] = field(default_factory=dict)
    sent: set[Moment] = field(default_factory=set)
    waiting: dict[Moment, list[str]] = field(default_factory=dict)

    def run(self) -> dict[str, _Visit]:
        """Go as far as can be; the visits at which slots wait for ever."""
        self.at = dict.fromkeys(self.visits, 0)
        ready = list(self.visits)
        while ready:
            device = ready.pop()
            while self.at[device] < len(self.visits[device]):
                woken = self._visit(device, self.visits[device][self.at[device]])
                if woken is None:
                    break
                self.at[device] += 1
                ready += woken
        left = {device: self.visits[device][at:] for device, at in self.at.items()}
        return {device: visits[0] for device, visits in left.items() if visits}

    def _visit(self, device: str, visit: _Visit) -> list[str] | None:
        """Do a visit; gives the slots that can go on with it, None where this one has to wait."""
        task = self.document.supertasks[visit.task]
        moment = (task.group, visit.microbatch)
        if task.kind == "send":
            self.sent.add(moment)
            return self.waiting.pop(moment, [])
        if task.kind == "recv":
            if moment in self.sent:
                return []
            self.waiting[moment] = [device]
            return None
        others = self.waiting.setdefault(moment, [])
        if len(others) + 1 < len(self.connections.groups[task.group or ""]):
            others.append(device)
            return None
        for other in self.waiting.pop(moment):
            self.at[other] += 1
        return others


def _deadlock(
    document: Document, connections: Connections, stuck: dict[str, _Visit]
) -> PipelineError:
    """The error that says where each slot stands, and for whom it waits there."""
    fronts = []
    for device, visit in stuck.items():
        members = connections.groups[document.supertasks[visit.task].group or ""]
        standing = {found for found in stuck.values() if found.microbatch == visit.microbatch}
        absent = [name for name in members if _Visit(name, visit.microbatch) not in standing]
        when = "" if visit.microbatch is None else f" of microbatch {visit.microbatch}"
        fronts.append(f"{device!r} stands at {visit.task!r}{when}, waiting for {absent[0]!r}")
    first = next(iter(stuck.values())).task
    return broken(
        "schedule-deadlock",
        f"the slots wait for one another: {'; '.join(fronts)}; put the communications of these "
        "stages in one order",
        task=first,
    )
