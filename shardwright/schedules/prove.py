"""That a schedule is whole and cannot deadlock.

Sends do not wait, receives do. So ranks can only stand still for ever where each of several waits
for an action that another has yet to do after the one it waits in. `execution_order` does the
actions one after another, each when what it needs is done; where it comes to an end with actions
left, there is such a circle, and the error shows it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence

from shardwright.errors import ScheduleError
from shardwright.schedules.schedule import Action, Schedule


def prove(schedule: Schedule) -> None:
    """Return if every action is there once, on the rank of its stage, and no order can deadlock.

    Raises ScheduleError that names the actions that lack, or the ranks that wait in a circle.
    """
    execution_order(schedule)


def needs(schedule: Schedule, action: Action) -> Iterator[Action]:
    """The actions that have to be done before this one, whatever the ranks' order."""
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    if kind == "F" and stage > 0:
        yield Action("F", stage - 1, microbatch)
    elif kind == "B":
        yield Action("F", stage, microbatch)
        if stage + 1 < schedule.stages:
            yield Action("B", stage + 1, microbatch)
    elif kind == "W":
        yield Action("B", stage, microbatch)


def execution_order(schedule: Schedule) -> list[Action]:
    """All actions in an order that every rank's list, and all that actions need, agree with.

    Raises ScheduleError where there is none, or where actions lack.
    """
    _check_complete(schedule)
    waiting = [deque(actions) for actions in schedule.actions]
    done: dict[Action, None] = {}
    before = -1
    while len(done) > before:
        before = len(done)
        for queue in waiting:
            while queue and all(need in done for need in needs(schedule, queue[0])):
                done[queue.popleft()] = None
    if any(waiting):
        raise ScheduleError(_circle(schedule, waiting, done))
    return list(done)


def _circle(schedule: Schedule, waiting: Sequence[deque[Action]], done: Collection[Action]) -> str:
    """The ranks that wait for one another, one a line."""
    rank = next(rank for rank, queue in enumerate(waiting) if queue)
    lines: dict[int, str] = {}
    while rank not in lines:
        action = waiting[rank][0]
        needed = next(need for need in needs(schedule, action) if need not in done)
        owner = schedule.placement[needed.stage]
        lines[rank] = (
            f"rank {rank} waits in {action} for {needed}, which rank {owner} does after "
            f"{waiting[owner][0]}"
        )
        rank = owner
    circle = list(lines)[list(lines).index(rank) :]
    return "\n  ".join(["the order deadlocks:", *(lines[rank] for rank in circle)])


def _check_complete(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule.actions):
        expected = Counter(
            Action(kind, stage, microbatch)
            for kind in schedule.works
            for stage in schedule.stages_of(rank)
            for microbatch in range(schedule.microbatches)
        )
        found = Counter(actions)
        for what, wrong in (("lacks", expected - found), ("must not do", found - expected)):
            if wrong:
                raise ScheduleError(
                    f"rank {rank} {what} {', '.join(map(str, wrong))}; it does "
                    f"{', '.join(schedule.works)} once for each of its stages "
                    f"{list(schedule.stages_of(rank))} and {schedule.microbatches} microbatches"
                )
