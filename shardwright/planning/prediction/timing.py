"""How long a step takes whose stages take so long: a schedule laid out in time.

Comes in: a schedule, what each virtual stage takes for a microbatch, and what passes between
stages. Goes out: when each pipeline rank is done, and how long it is at work. A rank begins an
action when the one before it in its list has ended and what it reads of other stages is there:
what the stages really send one another, not what stands before it in the chain. Messages between
two ranks go one after another and cost no rank any time.

Numbers may be arrays, one entry a candidate: a schedule then is laid out for all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.schedules import Schedule, make_schedule
from shardwright.schedules.held import AHEAD, Rows, held_apart, held_at_once
from shardwright.schedules.prove import execution_order

Number = Any
"""A float, or an array of them."""


class StageTimes(NamedTuple):
    """Seconds of each virtual stage for a microbatch.

    ``backward`` gives the gradients of what other stages made, ``weight`` those of stored values.
    ``taking`` and ``taking_back`` are what a rank does for messages to a forward and to a backward
    before they come: it does not wait for them to begin with that.
    """

    forward: Sequence[Number]
    backward: Sequence[Number]
    weight: Sequence[Number]
    taking: Sequence[Number] = ()
    taking_back: Sequence[Number] = ()


class Passing(NamedTuple):
    """What one stage sends another for each microbatch: seconds on the line, and seconds more.

    A latency of -inf says that nothing is sent.
    """

    line: Number
    latency: Number


@dataclass(frozen=True, slots=True)
class Traffic:
    """What stages send each other, by the stage that sends and the one that reads."""

    forward: Mapping[tuple[int, int], Passing] = field(default_factory=dict)
    backward: Mapping[tuple[int, int], Passing] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Laid:
    """When each rank has done its last action, and how long it works, in seconds."""

    done: list[Number]
    busy: list[Number]


class HeldApart(NamedTuple):
    """The rows of `Apart` of a rank; and where each backward waits."""

    usual: tuple[NDArray[np.int64], NDArray[np.int64]]
    waiting: tuple[NDArray[np.int64], NDArray[np.int64]]

    def most(self, each: NDArray[np.float64], *, ahead: bool) -> tuple[float, float]:
        """The most that is held before backwards and behind them, of so much in each column."""
        before, behind = (float((rows @ each).max()) for rows in self.usual)
        if ahead:
            before += AHEAD * (float((self.waiting[0] @ each).max()) - before)
            behind += AHEAD * (float((self.waiting[1] @ each).max()) - behind)
        return before, behind


@dataclass(frozen=True)
class Order:
    """A schedule, and what follows from it alone."""

    schedule: Schedule

    @cached_property
    def actions(self) -> tuple[tuple[str, int, int], ...]:
        """Its actions in an order in which they can be done: (kind, stage, microbatch)."""
        return tuple((a.kind, a.stage, a.microbatch) for a in execution_order(self.schedule))

    @cached_property
    def held(self) -> tuple[Rows, ...]:
        """Of each rank, how many microbatches of each stage it holds at once: the largest such."""
        return self._held(inside=False)

    @cached_property
    def ahead(self) -> tuple[Rows, ...]:
        """The same where each backward waits, for other slots of its own stage."""
        return self._held(inside=True)

    @cached_property
    def most_held(self) -> tuple[float, ...]:
        """How many microbatches each stage holds at the most."""
        most = [0.0] * self.schedule.stages
        for rank, counts in enumerate(self.held):
            stages = self.schedule.stages_of(rank)
            for stage, count in zip(stages, map(max, zip(*counts, strict=True)), strict=True):
                most[stage] = float(count)
        return tuple(most)

    @cached_property
    def apart(self) -> tuple[HeldApart, ...]:
        """Of each rank, what it holds where weight gradients are actions of their own."""
        return tuple(
            HeldApart(self._apart(rank, inside=False), self._apart(rank, inside=True))
            for rank in range(self.schedule.ranks)
        )

    def under_way(self, giver: int, taker: int, kind: str) -> int:
        """The most microbatches of which one stage has sent another something that it still holds.

        They are sent by the forward or the backward, and held until the taker is done with all of
        the microbatch.
        """
        key = giver, taker, kind
        if key not in self._under_way:
            sent, done = self._ends[kind, giver], self._ends[self.schedule.works[-1], taker]
            left = np.arange(1, len(sent) + 1) - np.searchsorted(done, sent, side="right")
            self._under_way[key] = int(left.max(initial=0))
        return self._under_way[key]

    @cached_property
    def _under_way(self) -> dict[tuple[int, int, str], int]:
        return {}

    @cached_property
    def _ends(self) -> dict[tuple[str, int], list[int]]:
        """When a stage is done with its actions of a kind, if each takes one unit of time."""
        place = self.schedule.placement
        free, done = [0] * self.schedule.ranks, dict[tuple[str, int, int], int]()
        found: dict[tuple[str, int], list[int]] = {}
        for kind, stage, microbatch in self.actions:
            before = (kind, stage + (1 if kind == "B" else -1), microbatch)
            end = 1 + max(free[place[stage]], done.get(before, 0))
            free[place[stage]] = done[kind, stage, microbatch] = end
            found.setdefault((kind, stage), []).append(end)
        return found

    def _apart(self, rank: int, *, inside: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        before, behind = held_apart(self.schedule, rank, inside=inside)
        return np.array(before), np.array(behind)

    def _held(self, *, inside: bool) -> tuple[Rows, ...]:
        ranks = range(self.schedule.ranks)
        return tuple(held_at_once(self.schedule, rank, inside=inside) for rank in ranks)


@lru_cache(maxsize=512)
def order_of(kind: str, ranks: int, microbatches: int, chunks: int | None = None) -> Order:
    """The order of a schedule. Raises ScheduleError as `make_schedule` does."""
    return Order(make_schedule(kind, ranks=ranks, microbatches=microbatches, chunks=chunks))


def lay_out(order: Order, times: StageTimes, traffic: Traffic, *, early: bool = True) -> Laid:
    """A schedule in time.

    ``early`` says whether a backward sends its gradients before it makes those of weights.
    """
    return _Clock(order, times, traffic, early).run()


class _Clock:
    """The state while a schedule is laid out; `run` does it."""

    def __init__(self, order: Order, times: StageTimes, traffic: Traffic, early: bool) -> None:
        self.order, self.times, self.early = order, times, early
        schedule = order.schedule
        self.later = _later(times)
        self.placement, self.splits = schedule.placement, schedule.splits_backward
        zero = _zero(times)
        none = [zero] * schedule.stages
        self.taking, self.taking_back = times.taking or none, times.taking_back or none
        self.free = [zero] * schedule.ranks
        self.busy = [zero] * schedule.ranks
        self.forward_sends = _sends(schedule, traffic.forward)
        self.backward_sends = _sends(schedule, traffic.backward)
        self.lines: dict[tuple[int, int], Number] = {}
        self.arrived: dict[tuple[str, int, int], Number] = {}

    def run(self) -> Laid:
        act = {"F": self._forward, "B": self._backward, "W": self._weight}
        for kind, stage, microbatch in self.order.actions:
            act[kind](stage, microbatch)
        return Laid(self.free, self.busy)

    def _forward(self, stage: int, microbatch: int) -> None:
        self._take(stage, self.taking)
        end = self._work("F", stage, microbatch, self.times.forward[stage])
        self._send("F", self.forward_sends[stage], stage, microbatch, end)

    def _backward(self, stage: int, microbatch: int) -> None:
        self._take(stage, self.taking_back)
        sent = end = self._work("B", stage, microbatch, self.times.backward[stage])
        if not self.splits:
            end = self._work("W", stage, microbatch, self.times.weight[stage])
        self._send("B", self.backward_sends[stage], stage, microbatch, sent if self.early else end)

    def _weight(self, stage: int, microbatch: int) -> None:
        self._work("W", stage, microbatch, self.times.weight[stage])

    def _take(self, stage: int, seconds: Sequence[Number]) -> None:
        """Let a stage's rank make ready for what is sent to it."""
        rank = self.placement[stage]
        self.free[rank] = self.free[rank] + seconds[stage]
        self.busy[rank] = self.busy[rank] + seconds[stage]

    def _work(self, kind: str, stage: int, microbatch: int, seconds: Number) -> Number:
        """Let a stage's rank work; when that is done."""
        rank = self.placement[stage]
        start = self.free[rank]
        there = self.arrived.pop((kind, stage, microbatch), None)
        if there is not None:
            start = self.later(start, there)
        self.free[rank] = end = start + seconds
        self.busy[rank] = self.busy[rank] + seconds
        return end

    def _send(
        self, kind: str, sends: Sequence[_Send], stage: int, microbatch: int, made: Number
    ) -> None:
        """Let what a stage made arrive where it is read."""
        for send in sends:
            there = made
            if send.ranks is not None:
                start = (
                    self.later(made, self.lines[send.ranks]) if send.ranks in self.lines else made
                )
                self.lines[send.ranks] = start + send.line
                there = start + send.line + send.latency
            key = (kind, send.stage, microbatch)
            before = self.arrived.get(key)
            self.arrived[key] = there if before is None else self.later(before, there)


class _Send(NamedTuple):
    """To which stage, and over which line: None on one rank."""

    stage: int
    ranks: tuple[int, int] | None
    line: Number
    latency: Number


def _sends(schedule: Schedule, passing: Mapping[tuple[int, int], Passing]) -> list[list[_Send]]:
    """What each stage sends."""
    found: list[list[_Send]] = [[] for _ in range(schedule.stages)]
    for (giver, taker), (line, latency) in sorted(passing.items(), key=itemgetter(0)):
        here, there = schedule.placement[giver], schedule.placement[taker]
        ranks = None if here == there else (here, there)
        found[giver].append(_Send(taker, ranks, line, latency))
    return found


def _later(times: StageTimes) -> Callable[[Number, Number], Number]:
    return np.maximum if isinstance(times.forward[0], np.ndarray) else max


def _zero(times: StageTimes) -> Number:
    first = times.forward[0]
    return np.zeros_like(first) if isinstance(first, np.ndarray) else 0.0
