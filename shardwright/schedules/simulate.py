"""How long a schedule takes, who waits, and what is held, for given durations.

Comes in: a schedule, and how long a stage's work on a microbatch takes. Goes out: when each action
begins and ends. A rank begins an action as soon as the one before it in its list has ended and
what it needs is there; what comes from another rank is there ``communication`` later, and costs
neither rank any time: sends overlap compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from shardwright.errors import ScheduleError
from shardwright.schedules.prove import execution_order, needs
from shardwright.schedules.schedule import Action, Schedule

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
