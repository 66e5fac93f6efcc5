"""Running through a schedule: that it is whole, cannot deadlock, how long it takes, what it holds.

Sends do not wait, receives do. So ranks can only stand still for ever where each of several waits
for an action that another has yet to do after the one it waits in. `execution_order` does the
actions one after another, each when what it needs is done; where it comes to an end with actions
left, there is such a circle, and the error shows it.

`simulate` lays the actions out in time for given durations. A rank begins an action as soon as the
one before it in its list has ended and what it needs is there; what comes from another rank is
there ``communication`` later, and costs neither rank any time: sends overlap compute.

As text a schedule is a table: one row a rank, one column a slot of time. Every F, B and W takes one
slot; a B that gives weight gradients too takes two. What does not fit into the width continues
below, as in a musical score.

`held_at_once` counts microbatches from their forward to their backward. A worker looks one action
ahead: while a backward waits, for the gradients of another stage or for other devices inside its
own, the forward behind it is done.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from math import ceil
from string import ascii_lowercase
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import ArrayLike

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


# --- as text --------------------------------------------------------------------------------------


WAITING, GOING_ON = ".", "--"


def format_schedule(
    schedule: Schedule, *, width: int = 100, labels: Sequence[str] | None = None
) -> str:
    """The table of a schedule, how long ranks wait, what they hold, and that it cannot deadlock.

    ``F2b`` is the forward of microbatch 2 through the rank's second stage; with one stage a rank
    it is ``F2``. ``width`` is in characters, ``labels`` names the ranks (``rank 0`` by default).
    Raises ScheduleError where the schedule lacks work, or can deadlock.
    """
    prove(schedule)
    simulation = simulate(schedule)
    labels = labels or [f"rank {rank}" for rank in range(schedule.ranks)]
    heads = [_head(schedule, rank, label) for rank, label in enumerate(labels)]
    rows = [_cells(schedule, simulation, rank) for rank in range(schedule.ranks)]
    return "\n".join(
        [
            f"{schedule.kind}: ranks {schedule.ranks}, stages a rank {schedule.chunks}, "
            f"microbatches {schedule.microbatches}",
            *_wrapped(heads, rows, width),
            "",
            *_figures(schedule, simulation),
        ]
    )


def _head(schedule: Schedule, rank: int, label: str) -> str:
    """A rank's label; with several stages, their numbers by their marks."""
    stages = schedule.stages_of(rank)
    if len(stages) == 1:
        return label
    numbers = " ".join(f"{_mark(stages, stage)}={stage}" for stage in stages)
    return f"{label} ({numbers})"


def _mark(stages: Sequence[int], stage: int) -> str:
    """A letter for each of a rank's stages; its number where there are more than letters."""
    if len(stages) == 1:
        return ""
    return ascii_lowercase[stages.index(stage)] if len(stages) <= 26 else f".{stage}"


def _cells(schedule: Schedule, simulation: Simulation, rank: int) -> list[str]:
    """What a rank does in each slot of time."""
    stages = schedule.stages_of(rank)
    cells = [WAITING] * round(simulation.step_time)
    for action in schedule.actions[rank]:
        start, end = map(round, simulation.spans[action])
        cells[start] = f"{action.kind}{action.microbatch}{_mark(stages, action.stage)}"
        cells[start + 1 : end] = [GOING_ON] * (end - start - 1)
    return cells


def _wrapped(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """The rows in as many blocks as the width asks for, with the slots' numbers above each."""
    margin, length = max(map(len, heads)), len(rows[0])
    cell = 1 + max(len(text) for row in rows for text in row)
    blocks = ceil(length / max(1, (width - margin) // cell))
    columns = ceil(length / blocks)
    for first in range(0, length, columns):
        slots = range(first, min(first + columns, length))
        numbers = (str(slot) if slot in (first, *range(0, length, 5)) else "" for slot in slots)
        yield ""
        yield (" " * margin + "".join(f"{number:>{cell}}" for number in numbers)).rstrip()
        for head, row in zip(heads, rows, strict=True):
            texts = (f"{row[slot]:>{cell}}" for slot in slots)
            yield f"{head:<{margin}}{''.join(texts)}"


def _figures(schedule: Schedule, simulation: Simulation) -> Iterator[str]:
    """What the table amounts to, one line each."""
    bubbles = ", ".join(f"{bubble:.1%}" for bubble in simulation.rank_bubbles)
    peaks = ", ".join(f"{peak:g}" for peak in simulation.peak_activations)
    count = sum(map(len, schedule.actions))
    yield f"bubble            {simulation.bubble:.1%} of {simulation.step_time:g} slots ({bubbles})"
    yield f"peak activations  {peaks} (of one stage and one microbatch)"
    yield f"deadlock          impossible: one order of all {count} actions agrees with every rank's"


# --- microbatches held at once --------------------------------------------------------------------


Rows = tuple[tuple[int, ...], ...]
"""Numbers of microbatches of each stage, once for each time that counts."""

AHEAD = 0.5
"""How much of the next forward a slot has done that waits for others of its stage now and again. It
depends on who is late; in simulations of transformers it is a third to a half."""
ENOUGH_TO_WAIT = 0.01
"""Of what is kept so much is brought by communication where slots wait; a loss alone is less."""


class HeldMicrobatches(NamedTuple):
    """What a rank holds at once; where its slots wait for one another, ``waiting`` what then."""

    usual: Rows
    waiting: Rows | None = None

    def most(self, each: ArrayLike) -> float:
        """The most that a rank holds of which a microbatch has so much in each stage."""
        alone = max(np.dot(row, each) for row in self.usual)
        if self.waiting is None:
            return float(alone)
        ahead = max(np.dot(row, each) for row in self.waiting)
        return float(alone + AHEAD * (ahead - alone))


def held_at_once(
    schedule: Schedule, rank: int, *, inside: bool = False, least: bool = False
) -> Rows:
    """Numbers of microbatches held at once of a rank's stages, those less than others left out.

    ``inside`` is where each backward waits, for other devices of its own stage. Of ``least``
    no forward is done while a backward waits, and what only waits for weight gradients does not
    count: so many are held whole in any case.
    """
    stages = schedule.stages_of(rank)
    place = {stage: i for i, stage in enumerate(stages)}
    now, found = [0] * len(stages), set()
    for action, following in pairwise((*schedule.actions[rank], None)):
        assert action is not None
        waits = action.kind == "B" and (inside or action.stage < schedule.stages - 1)
        if waits and not least and following is not None and following.kind == "F":
            next_stage = place[following.stage]
            found.add(tuple(count + (i == next_stage) for i, count in enumerate(now)))
        if action.kind == "F":
            now[place[action.stage]] += 1
            if following is None or following.kind != "F":  # behind another forward it holds more
                found.add(tuple(now))
        elif action.kind == ("B" if least else schedule.works[-1]):
            now[place[action.stage]] -= 1
    return _largest(found)


def waits_inside(brought: float, kept: float) -> bool:
    """Whether slots of a stage wait for one another: bytes that they bring each other and keep."""
    return brought > ENOUGH_TO_WAIT * kept


def _largest(found: Collection[tuple[int, ...]]) -> Rows:
    """Of distinct rows of numbers those that no other has at least as much as in every place."""
    rows = np.array(sorted(found))
    within = (rows[:, None] <= rows).all(axis=2).sum(axis=1)  # each is within itself
    return tuple(tuple(row) for row in rows[within == 1].tolist())
