"""The schedule of a pipeline file: what the file says of it, and that slots can work by it.

The file has the kind and its numbers, not the actions: the same kind and numbers always give the
same actions. The order of work follows from both together: each slot does its supertasks action by
action. Shown is that a supertask finds what it reads made before, and that no slot waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardwright.errors import PipelineError, ScheduleError
from shardwright.pipeline.check_structure import GroupVisit, run_communications
from shardwright.pipeline.connections import Connections
from shardwright.pipeline.rules import broken
from shardwright.pipeline.schema import Document, Phase, ScheduleInfo, Training
from shardwright.schedules.make import KINDS, make_schedule
from shardwright.schedules.schedule import Action, Schedule, Work

_PHASES: dict[Work, Phase] = {"F": "forward", "B": "backward", "W": "backward_weight"}
_KINDS: dict[str | None, Work] = {phase: kind for kind, phase in _PHASES.items()}


def schedule_of(training: Training) -> Schedule:
    """The schedule that a file's ``training`` tells.

    Raises ScheduleError that names the key where one lacks, or does not go with the others.
    """
    info, microbatches = training.schedule, training.microbatches
    if info is None or microbatches is None:
        raise ScheduleError(
            f"training.{'schedule' if info is None else 'microbatches'} is missing: the file is "
            "not of a training step with a schedule"
        )
    if info.kind not in KINDS:
        raise _wrong("kind", info.kind, " or ".join(KINDS))
    try:
        schedule = make_schedule(
            info.kind, ranks=info.ranks, chunks=info.chunks, microbatches=microbatches.n
        )
    except ScheduleError as error:
        raise ScheduleError(f"training.schedule.chunks: {error}") from None
    if info.placement != schedule.placement:
        raise _wrong("placement", list(info.placement), f"{list(schedule.placement)}")
    if len(info.slots) != info.ranks:
        raise _wrong("slots", f"{len(info.slots)} lists", f"{info.ranks}, one a pipeline rank")
    return schedule


def _wrong(key: str, found: object, expected: str) -> ScheduleError:
    return ScheduleError(f"training.schedule.{key} is {found!r}; expected {expected}")


def schedule_info(schedule: Schedule, slots: Sequence[Sequence[str]]) -> ScheduleInfo:
    """What a file says of a schedule; ``slots`` are the device slots of each pipeline rank."""
    assert len(slots) == schedule.ranks
    return ScheduleInfo(
        kind=schedule.kind,
        ranks=schedule.ranks,
        chunks=schedule.chunks,
        placement=schedule.placement,
        slots=tuple(tuple(group) for group in slots),
    )


class SlotAction(NamedTuple):
    """Supertasks that a slot does one after another, in file order.

    ``number`` counts the schedule's actions, with the phase ``prepare`` before the first and
    ``update`` after the last; ``action`` is None in these two, which come once a step.
    """

    number: int
    phase: Phase
    action: Action | None
    tasks: tuple[str, ...]


def slot_actions(index: Connections, slot: str, schedule: Schedule) -> Iterator[SlotAction]:
    """What a slot does in a training step: `SlotAction`s that have supertasks.

    A backward that is not split is two, input gradients before weight gradients.
    """
    document = index.document
    assert document.training is not None
    assert document.training.schedule is not None
    slots = document.training.schedule.slots
    rank = next(rank for rank, names in enumerate(slots) if slot in names)
    tasks: dict[tuple[Phase | None, int | None], list[str]] = {}
    for name in index.order[slot]:
        task = document.supertasks[name]
        tasks.setdefault((task.phase, task.stage), []).append(name)
    actions: list[tuple[Phase, Action | None, int]] = [("prepare", None, 0)]
    for number, action in enumerate(schedule.actions[rank], start=1):
        actions += [(phase, action, number) for phase in phases_of(schedule, action.kind)]
    actions.append(("update", None, len(schedule.actions[rank]) + 1))
    for phase, do, number in actions:
        if found := tasks.get((phase, do.stage if do else None)):
            yield SlotAction(number, phase, do, tuple(found))


def phases_of(schedule: Schedule, kind: Work) -> tuple[Phase, ...]:
    """The phases of which an action does the supertasks, one after another."""
    whole = kind == "B" and not schedule.splits_backward
    return ("backward", "backward_weight") if whole else (_PHASES[kind],)


# --- rules --------------------------------------------------------------------------------------


def check_schedule(index: Connections) -> None:
    """Slots can work as the schedule says; other rules hold already."""
    training = index.document.training
    if training is None or training.schedule is None:
        return
    try:
        schedule = schedule_of(training)
    except ScheduleError as error:
        raise broken("schedule", str(error)) from None
    _check_reads(index, schedule)
    _check_deadlock(index, schedule)


def _check_reads(index: Connections, schedule: Schedule) -> None:
    """Each action comes behind those that make what its supertasks read."""
    places = {
        action: position for actions in schedule.actions for position, action in enumerate(actions)
    }
    seen: set[tuple[tuple[Work, int], tuple[Work, int]]] = set()
    for producer, reader, tensor in _reads(index):
        made = _action(index.document, schedule, producer)
        read = _action(index.document, schedule, reader)
        if made is None or read is None or made == read or (made, read) in seen:
            continue
        seen.add((made, read))
        for microbatch in range(schedule.microbatches):
            before, after = Action(*made, microbatch), Action(*read, microbatch)
            if places[before] > places[after]:
                raise broken(
                    "schedule-order",
                    f"{producer!r} makes the tensor in {before}, which the schedule "
                    f"{schedule.kind} does after {after}",
                    task=reader,
                    tensor=tensor,
                )


def _reads(index: Connections) -> Iterator[tuple[str, str, str]]:
    """A supertask that makes a tensor, one that reads it, and the tensor."""
    for tensor, users in index.users.items():
        if (producer := index.producer(tensor)) is not None:
            for user in users:
                yield producer, user, tensor


def _action(document: Document, schedule: Schedule, name: str) -> tuple[Work, int] | None:
    """The kind and stage of the actions that do a supertask; None where it is done once a step."""
    task = document.supertasks[name]
    kind = _KINDS.get(task.phase)
    if kind is None or task.stage is None:
        return None
    return ("B" if kind == "W" and not schedule.splits_backward else kind), task.stage


def _check_deadlock(index: Connections, schedule: Schedule) -> None:
    """All slots come to the end of the step, where sends wait for nobody."""
    tasks = index.document.supertasks
    visits = {
        slot: [
            GroupVisit(name, turn.action.microbatch if turn.action else None)
            for turn in slot_actions(index, slot, schedule)
            for name in turn.tasks
            if tasks[name].group is not None
        ]
        for slot in index.document.devices
    }
    stuck = run_communications(index, visits, sends_wait=False)
    if stuck:
        raise _deadlock(index, stuck)


def _deadlock(index: Connections, stuck: dict[str, GroupVisit]) -> PipelineError:
    """The error that says where each slot stands, and for whom it waits there."""
    fronts = []
    for device, visit in stuck.items():
        members = index.groups[index.document.supertasks[visit.task].group or ""]
        waiting = {*stuck.values()}
        absent = [name for name in members if GroupVisit(name, visit.microbatch) not in waiting]
        when = "" if visit.microbatch is None else f" of microbatch {visit.microbatch}"
        fronts.append(f"{device!r} stands at {visit.task!r}{when}, waiting for {absent[0]!r}")
    return broken(
        "schedule-deadlock",
        f"the slots wait for one another: {'; '.join(fronts)}; put the communications of these "
        "stages in one order",
        task=next(iter(stuck.values())).task,
    )
