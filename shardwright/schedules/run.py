"""Running through a schedule: that it is whole, cannot deadlock, and how long it takes.

Sends do not wait, receives do. So ranks can only stand still for ever where each of several waits
for an action that another has yet to do after the one it waits in. `execution_order` does the
actions one after another, each when what it needs is done; where it comes to an end with actions
left, there is such a circle, and the error shows it.

`simulate` lays the actions out in time for given durations. A rank begins an action as soon as the
one before it in its list has ended and what it needs is there; what comes from another rank is
there ``communication`` later, and costs neither rank any time: sends overlap compute.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

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


# --- in time ----------------------------------------------------------------------------------


Durations = float | Sequence[float]
"""One for all stages, or one a stage, in any unit of time."""


class Simulation(msgspec.Struct, frozen=True):
    """A schedule laid out in time; times are in the unit of the durations, from 0.

    ``busy`` is each rank's time at work, ``peak_activations`` the most that it holds at once in
    activations of one stage and one microbatch. A rank of v chunks has v times as small stages.
    """

    step_time: float
    busy: tuple[float, ...]
    peak_activations: tuple[float, ...]
    spans: Mapping[Action, tuple[float, float]]
    """When each action begins and ends."""

    @property
    def rank_bubbles(self) -> tuple[float, ...]:
        """The fraction of the step that each rank waits."""
        return tuple(1 - busy / self.step_time for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The fraction of the step that the ranks wait, all together."""
        return sum(self.rank_bubbles) / len(self.busy)


def simulate(
    schedule: Schedule,
    *,
    forward: Durations = 1.0,
    backward: Durations = 1.0,
    weight: Durations = 1.0,
    communication: float = 0.0,
    sizes: Sequence[float] | None = None,
) -> Simulation:
    """Lay a schedule out in time.

    ``forward``, ``backward`` (the gradients of inputs) and ``weight`` (those of weights) are
    durations, for all stages or one a stage; where weight gradients are no actions of their own, B
    takes both. ``sizes`` are relative sizes of the microbatches, which durations and activations
    are multiplied with; all 1 by default.
    Raises ScheduleError where the schedule deadlocks, and where durations or sizes are too few.
    """
    lasting = {
        "F": _for_each_stage(schedule, "forward", forward),
        "B": _for_each_stage(schedule, "backward", backward),
        "W": _for_each_stage(schedule, "weight", weight),
    }
    if not schedule.splits_backward:
        lasting["B"] = [b + w for b, w in zip(lasting["B"], lasting["W"], strict=True)]
    scale = [1.0] * schedule.microbatches if sizes is None else sizes
    if len(scale) != schedule.microbatches:
        raise ScheduleError(f"{len(scale)} sizes for {schedule.microbatches} microbatches")
    spans: dict[Action, tuple[float, float]] = {}
    free, busy = [0.0] * schedule.ranks, [0.0] * schedule.ranks
    for action in execution_order(schedule):
        rank = schedule.placement[action.stage]
        arrivals = (
            spans[need][1] + communication * (schedule.placement[need.stage] != rank)
            for need in needs(schedule, action)
        )
        start = max(free[rank], *arrivals, 0.0)
        duration = lasting[action.kind][action.stage] * scale[action.microbatch]
        spans[action] = start, start + duration
        free[rank] = start + duration
        busy[rank] += duration
    return Simulation(
        step_time=max(free),
        busy=tuple(busy),
        peak_activations=tuple(_peak(schedule, actions, scale) for actions in schedule.actions),
        spans=spans,
    )


def _for_each_stage(schedule: Schedule, name: str, durations: Durations) -> list[float]:
    given = [durations] * schedule.stages if isinstance(durations, (int, float)) else [*durations]
    if len(given) != schedule.stages:
        raise ScheduleError(f"{len(given)} {name} durations for {schedule.stages} stages")
    return given


def _peak(schedule: Schedule, actions: Sequence[Action], sizes: Sequence[float]) -> float:
    """The most activations at once: held from a forward until the stage's last work on them."""
    change = {"F": 1, schedule.works[-1]: -1}
    held = peak = 0.0
    for action in actions:
        held += change.get(action.kind, 0) * sizes[action.microbatch]
        peak = max(peak, held)
    return peak
