"""Training steps: how a file cuts them into actions, and the rules that make them run.

A step goes through the phases ``prepare`` (once), ``forward``, ``backward`` and ``backward_weight``
(once a microbatch, stage by stage, as the schedule says) and ``update`` (once). The file has the
schedule's kind and numbers, not the actions: the same kind and numbers always give the same
actions. Each slot does its supertasks action by action. Shown is that a supertask finds what it
reads made before, and that no slot waits for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from shardwright.errors import ScheduleError
from shardwright.pipeline.check_structure import GroupVisit, run_communications
from shardwright.pipeline.check_tensors import cannot_replace
from shardwright.pipeline.connections import Connections
from shardwright.pipeline.rules import MICROBATCH_PHASES, READS, Finding, broken
from shardwright.pipeline.schema import (
    Document,
    MetadataTensorSlice,
    Microbatches,
    Phase,
    ScheduleInfo,
    SuperTask,
    Training,
)
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


# --- phases and stages ----------------------------------------------------------------------------


def check_step(index: Connections) -> Finding:
    """A training step has both microbatches and a schedule."""
    training = index.document.training or Training()
    if (training.microbatches is None) == (training.schedule is None):
        return None
    pair = ("microbatches", "schedule")
    found, missing = pair if training.microbatches else reversed(pair)
    return f"training has {found} but no {missing}; a step needs both"


def check_phase(index: Connections, name: str, task: SuperTask) -> Finding:
    """A supertask of a device has a phase in a training step, and only there."""
    microbatches = _microbatches(index.document)
    if task.device is not None and microbatches is not None and task.phase is None:
        return "the supertask of a training step has no phase"
    if microbatches is None and task.phase is not None:
        return (
            f"the supertask has the phase {task.phase!r}, but the pipeline no "
            "training.microbatches; remove the one or add the other"
        )
    return None


def _microbatches(document: Document) -> Microbatches | None:
    return document.training.microbatches if document.training is not None else None


def check_stage(index: Connections, name: str, task: SuperTask) -> Finding:
    """A supertask has a stage where it runs once a microbatch, and only there."""
    if task.stage is None and task.phase in MICROBATCH_PHASES:
        return f"a supertask of phase {task.phase} needs a stage"
    if task.stage is not None and task.phase not in MICROBATCH_PHASES:
        when = f"of phase {task.phase}" if task.phase else "without a phase"
        return f"a supertask {when} has no stage; remove it"
    return None


def check_numbers(index: Connections) -> Finding:
    """The schedule's numbers go together, and each device slot is of one pipeline rank."""
    if (info := _schedule(index.document)) is None:
        return None
    for key, found, expected in (
        ("slots", len(info.slots), info.ranks),
        ("placement", len(info.placement), info.ranks * info.chunks),
    ):
        if found != expected:
            return (
                f"training.schedule.{key} has {found} entries for {info.ranks} ranks of "
                f"{info.chunks} stages, expected {expected}"
            )
    stages = Counter(info.placement)
    if uneven := [rank for rank in range(info.ranks) if stages[rank] != info.chunks]:
        return (
            f"training.schedule.placement gives rank {uneven[0]} {stages[uneven[0]]} stages, "
            f"expected {info.chunks} on each rank"
        )
    listed = Counter(chain.from_iterable(info.slots))
    for device in {**index.document.devices, **listed}:
        is_known = device in index.document.devices
        if not is_known or listed[device] != 1:
            times = f"{listed[device]} times" if is_known else "and is no device"
            return (
                f"{device!r} stands in training.schedule.slots {times}; each device stands there "
                "once, with its pipeline rank"
            )
    return None


def _schedule(document: Document) -> ScheduleInfo | None:
    return document.training.schedule if document.training is not None else None


def check_rank(index: Connections, name: str, task: SuperTask) -> Finding:
    """A stage is one of the pipeline rank of its device."""
    info = _schedule(index.document)
    if info is None or task.stage is None:
        return None
    rank = next(rank for rank, devices in enumerate(info.slots) if task.device in devices)
    mine = [stage for stage, other in enumerate(info.placement) if other == rank]
    if task.stage in mine:
        return None
    return (
        f"the stage is {task.stage}, but device {task.device!r} is of pipeline rank {rank}, which "
        f"has {', '.join(map(str, mine))}"
    )


def check_phase_order(index: Connections, name: str, task: SuperTask) -> Finding:
    """A supertask reads what its own phase or those before it made."""
    for tensor, producer, made in _reads_of_later(index, task):
        if task.phase != "update":
            message = (
                f"a supertask of phase {task.phase} reads what {producer!r} of phase {made} makes, "
                "which comes later in a step"
            )
            return broken("phase-order", message, task=name, tensor=tensor)
    return None


def check_sums(index: Connections, name: str, task: SuperTask) -> Finding:
    """Of what microbatches made, only sums over them are read once a step."""
    document = index.document
    microbatches = _microbatches(document)
    if microbatches is None or microbatches.n == 1:
        return None
    for tensor, producer, _ in _reads_of_later(index, task):
        old = document.replaces.get(tensor)
        if old is None or document.tensors[old].init is None:
            message = (
                f"the supertask runs once a step, {producer!r} once a microbatch; let it read a "
                "sum over the microbatches: a tensor that replaces a constant with init"
            )
            return broken("once-a-step", message, task=name, tensor=tensor)
    return None


def _reads_of_later(index: Connections, task: SuperTask) -> Iterator[tuple[str, str, Phase]]:
    """Tensors that a supertask reads of phases that its own does not, with who makes them."""
    for tensor in task.inputs if task.phase is not None else ():
        producer = index.producer(tensor)
        made = index.document.supertasks[producer].phase if producer else None
        if producer and made and task.phase and made not in READS[task.phase]:
            yield tensor, producer, made


# --- microbatches ---------------------------------------------------------------------------------


def check_dims(index: Connections) -> Finding:
    """Microbatches are equal parts of inputs and outputs of the original."""
    originals = index.document.metadata.tensors
    if (microbatches := _microbatches(index.document)) is None:
        return None
    for name, dim in microbatches.dim.items():
        wholes = [side[name] for side in (originals.inputs, originals.outputs) if name in side]
        if not wholes:
            message = (
                "training.microbatches.dim names a tensor that is neither an input nor an output "
                "of the original"
            )
            return broken("microbatches", message, tensor=name)
        for whole in wholes:
            if dim >= len(whole.shape) or whole.shape[dim] % microbatches.n:
                message = (
                    f"the shape {list(whole.shape)} cannot be cut along dimension {dim} in "
                    f"{microbatches.n} equal microbatches"
                )
                return broken("microbatches", message, tensor=name)
    return None


def check_slice(index: Connections, side: str, tensor: str, piece: MetadataTensorSlice) -> Finding:
    """A slice is of microbatch 0 where it comes once a microbatch, else of the whole."""
    tasks, microbatches = index.document.supertasks, _microbatches(index.document)
    if microbatches is None:
        return None
    of_side = index.producers if side == "outputs" else index.users
    users = of_side.get(tensor, [])
    again = [user for user in users if tasks[user].phase in MICROBATCH_PHASES]
    is_cut = piece.origin in microbatches.dim
    if side == "inputs" and again and len(again) < len(users):
        once = next(user for user in users if user not in again)
        message = (
            f"{again[0]!r} reads the input once a microbatch, {once!r} once a step; give each a "
            "slice of its own"
        )
        return broken("microbatches", message, task=once, tensor=tensor)
    if side == "outputs" and is_cut != bool(again) and (is_cut or microbatches.n > 1):
        when, has = ("microbatch", "no") if again else ("step", "a")
        message = (
            f"the output is made once a {when}, but its original {piece.origin!r} has {has} "
            "dimension in training.microbatches.dim"
        )
        return broken("microbatches", message, task=users[0], tensor=tensor)
    if not (again and is_cut):
        return None
    dim = microbatches.dim[piece.origin]
    whole = getattr(index.document.metadata.tensors, side)[piece.origin]
    size, (start, end) = whole.shape[dim] // microbatches.n, piece.placements[dim]
    if end <= size:
        return None
    return (
        f"the slice takes [{start}, {end}) of dimension {dim}; that of microbatch 0 lies inside "
        f"[0, {size})"
    )


def check_lasting(index: Connections) -> Finding:
    """A constant that is replaced once a microbatch is read only in the same work of a stage."""
    tasks = index.document.supertasks
    if _microbatches(index.document) is None:
        return None
    for new, old in index.document.replaces.items():
        maker = index.producers[new][0]
        phase, stage = tasks[maker].phase, tasks[maker].stage
        if phase == "prepare":
            return cannot_replace(new, old, f"{maker!r} of phase prepare makes it")
        for user in index.users[old] if phase != "update" else ():
            if (tasks[user].phase, tasks[user].stage) != (phase, stage):
                why = f"{user!r} reads that in another phase or stage than {maker!r} replaces it"
                return cannot_replace(new, old, why)
    return None


# --- the schedule ---------------------------------------------------------------------------------


def check_schedule(index: Connections) -> Finding:
    """The schedule can be made, and slots can work as it says; other rules hold already."""
    training = index.document.training
    if training is None or training.schedule is None:
        return None
    try:
        schedule = schedule_of(training)
    except ScheduleError as error:
        return str(error)
    return _late(index, schedule) or _deadlock(index, schedule)


def _late(index: Connections, schedule: Schedule) -> Finding:
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
                message = (
                    f"{producer!r} makes the tensor in {before}, which the schedule "
                    f"{schedule.kind} does after {after}"
                )
                return broken("schedule-order", message, task=reader, tensor=tensor)
    return None


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


def _deadlock(index: Connections, schedule: Schedule) -> Finding:
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
    if not stuck:
        return None
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
