"""A training step in time: the schedule of each pipeline rank, laid out as its devices walk it.

Input: a schedule, the tasks of each stage (`stage`), and links. Output: for each rank when it
is done, how long it works, and the most that it holds. The devices of a rank do the same at the
same time, so one stands for all.

A rank does its actions in order, task by task, as `engine.walk` has it: a task that communication
stands before waits for that, and an action of another stage for its messages; while the oldest
action waits, those up to `lookahead` behind it go on. Gradients are put together as soon as they
are whole and the last actions are under way. Where devices are CPU cores they move bytes
themselves, and that is work; elsewhere bytes move beside the work, and collectives and messages of
one line go one after another.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

from shardwright.clusters import Cluster, DeviceModel
from shardwright.clusters.links import Link
from shardwright.costs.placed import BACKWARD, FORWARD, WEIGHT
from shardwright.costs.roofline import worker_seconds
from shardwright.costs.stage import Sent, StageTasks
from shardwright.errors import PlanError
from shardwright.schedules import Schedule, make_schedule
from shardwright.schedules.run import Rows, held_at_once

LETTERS = {"F": FORWARD, "B": BACKWARD, "W": WEIGHT}


# --- schedules ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """A schedule, and what follows from it alone."""

    schedule: Schedule

    @cached_property
    def held(self) -> tuple[Rows, ...]:
        """Of each rank, how many microbatches of each stage it holds at once: the largest such."""
        return tuple(held_at_once(self.schedule, r) for r in range(self.schedule.ranks))

    @cached_property
    def ahead(self) -> tuple[Rows, ...]:
        """The same where each backward waits, for other devices of its own stage."""
        return tuple(
            held_at_once(self.schedule, r, inside=True) for r in range(self.schedule.ranks)
        )

    @cached_property
    def surely_held(self) -> tuple[Rows, ...]:
        """The same, of microbatches that are held whole whenever actions are done."""
        return tuple(held_at_once(self.schedule, r, least=True) for r in range(self.schedule.ranks))

    @cached_property
    def most_held(self) -> tuple[float, ...]:
        """How many microbatches each stage holds at the most."""
        most = [0.0] * self.schedule.stages
        for rank, counts in enumerate(self.held):
            stages = self.schedule.stages_of(rank)
            for stage, count in zip(stages, map(max, zip(*counts, strict=True)), strict=True):
                most[stage] = float(count)
        return tuple(most)


@lru_cache(maxsize=512)
def order_of(kind: str, ranks: int, microbatches: int, chunks: int | None = None) -> Order:
    """The order of a schedule. Raises ScheduleError as `make_schedule` does."""
    return Order(make_schedule(kind, ranks=ranks, microbatches=microbatches, chunks=chunks))


# --- links ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankLinks:
    """What links two ranks: that inside a host where devices at the same place share one."""

    cluster: Cluster
    hosts: Sequence[tuple[int, ...]]
    """Of each rank, the host of each device."""

    @classmethod
    def of(cls, cluster: Cluster, slots: Sequence[Sequence[str]]) -> RankLinks:
        """The links between ranks of these devices. Raises PlanError for one that is not there."""
        hosts = {device: number for number, host in enumerate(cluster.hosts) for device in host}
        if unknown := [device for devices in slots for device in devices if device not in hosts]:
            raise PlanError(
                f"the plan names the device slot {unknown[0]!r}, which the cluster lacks; it has "
                f"{', '.join(cluster.devices[:8])}{', …' if len(hosts) > 8 else ''}"
            )
        return cls(cluster, [tuple(hosts[device] for device in devices) for devices in slots])

    def between(self, here: int, there: int) -> Link:
        """The link of messages."""
        hosts = self.hosts[here], self.hosts[there]
        same = hosts[0] == hosts[1] or len({*hosts[0], *hosts[1]}) == 1
        return (self.cluster.inside if same else self.cluster.between).send


class StageMessage(NamedTuple):
    """What one stage sends another for each microbatch.

    On the line it takes ``line`` seconds; the sender is busy with it ``sending`` seconds, the
    receiver ``taking``. Within a rank nothing takes any time.
    """

    giver: int
    taker: int
    line: float = 0.0
    sending: float = 0.0
    taking: float = 0.0


def messages(
    sent: Sequence[Sent], placement: Sequence[int], links: RankLinks
) -> dict[int, list[StageMessage]]:
    """The messages of a microbatch: those of forwards, and those that answer in backwards."""
    found: dict[int, list[StageMessage]] = {FORWARD: [], BACKWARD: []}
    for one in sent:
        there = one.giver, one.taker, one.values, one.bytes
        back = one.taker, one.giver, one.answers, one.answer_bytes
        found[FORWARD].append(_message(*there, placement, links))
        if one.answers:
            found[BACKWARD].append(_message(*back, placement, links))
    return found


def _message(
    giver: int, taker: int, count: int, nbytes: float, placement: Sequence[int], links: RankLinks
) -> StageMessage:
    here, there = placement[giver], placement[taker]
    if here == there:
        return StageMessage(giver, taker)
    link, device = links.between(here, there), links.cluster.device
    each, moving = count * worker_seconds(device), nbytes / link.bandwidth
    latency = count * link.latency
    if device.kind == "cpu":
        return StageMessage(giver, taker, latency, each + moving, each)
    return StageMessage(giver, taker, latency + moving, each, each)


# --- programs -------------------------------------------------------------------------------------


class WorkPiece(NamedTuple):
    """Tasks of an action with no communication between them.

    ``line`` are seconds of the communication before it, ``rise`` the bytes that it holds at the
    most above what is held before it, ``growth`` what is held more behind it. ``sums`` are the
    gradients that are whole behind it in the last microbatch: seconds and bytes of putting each
    together. ``tail`` are seconds of communication behind it that nothing waits for.
    """

    line: float
    seconds: float
    rise: float
    growth: float
    sums: tuple[tuple[float, float], ...] = ()
    tail: float = 0.0


Program = Sequence[WorkPiece]


def stage_programs(tasks: StageTasks, device: DeviceModel) -> dict[object, Program]:
    """What each stage does in each pass: by (stage, pass), and in the last microbatch by True too.

    Where bytes do not move beside the work, communication is work.
    """
    beside, each = device.kind != "cpu", worker_seconds(device)
    tails = _renewals(tasks)
    sums: dict[int, list[tuple[float, float]]] = {}
    for reduction in tasks.placed.reductions:
        task = int(tasks.of_node[reduction.node])
        sums.setdefault(task, []).append((reduction.seconds, reduction.nbytes))
    found: dict[object, list[WorkPiece]] = {}
    columns = (tasks.stage, tasks.work, tasks.seconds, tasks.lines, tasks.moves)
    memory = (tasks.before, tasks.most, tasks.behind)
    rows = zip(*(column.tolist() for column in (*columns, *memory)), strict=True)
    for number, (stage, work, seconds, line, moves, before, most, behind) in enumerate(rows):
        busy = seconds + each * (1 + moves) + (0.0 if beside else line)
        piece = WorkPiece(
            line if beside else 0.0,
            busy,
            most - before,
            behind - before,
            tuple(sums.get(number, ())),
        )
        found.setdefault((stage, work, True), []).append(piece)
    for stage, (count, seconds) in tails.items():
        forward = found[stage, FORWARD, True]
        busy = forward[-1].seconds + count * each + (0.0 if beside else seconds)
        forward[-1] = forward[-1]._replace(seconds=busy, tail=seconds if beside else 0.0)
    return {
        **found,
        **{key[:2]: _joined(pieces) for key, pieces in found.items() if isinstance(key, tuple)},
    }


def _renewals(tasks: StageTasks) -> dict[int, tuple[int, float]]:
    """How many communications renew what each stage stores in a forward, and their seconds."""
    found: dict[int, tuple[int, float]] = {}
    for renewal in tasks.placed.renewals:
        stage = int(tasks.stages[renewal.node])
        count, seconds = found.get(stage, (0, 0.0))
        found[stage] = count + 1, seconds + renewal.seconds
    return found


def _joined(pieces: Sequence[WorkPiece]) -> Program:
    """Those without communication between them as one."""
    found: list[WorkPiece] = []
    for piece in pieces:
        if found and not piece.line:
            last = found.pop()
            rise = max(last.rise, last.growth + piece.rise)
            seconds, growth = last.seconds + piece.seconds, last.growth + piece.growth
            found.append(WorkPiece(last.line, seconds, rise, growth, tail=piece.tail))
        else:
            found.append(piece._replace(sums=()))
    return found


# --- the walk -------------------------------------------------------------------------------------


class Laid(NamedTuple):
    """A step in time: of each rank when it is done, how long it works, the most that it holds.

    ``under_way`` is the most messages that a stage (the first) has sent another (the second) in a
    pass, and that this one still holds.
    """

    done: list[float]
    busy: list[float]
    most: list[float]
    under_way: dict[tuple[int, int, int], int]


def _most_at_once(events: Sequence[tuple[float, int]]) -> int:
    """The largest sum of the numbers up to any time; what comes then is there before what goes."""
    now = most = 0
    for _, change in sorted(events, key=lambda event: (event[0], -event[1])):
        now += change
        most = max(most, now)
    return most


def lay_out(
    order: Order,
    sends: Mapping[int, Sequence[StageMessage]],
    programs: Mapping[object, Program],
    held: Sequence[float],
    device: DeviceModel,
    *,
    apart: bool = False,
    lookahead: int | None = None,
) -> Laid:
    """A step in time.

    ``sends`` are `messages`, ``programs`` those of `stage_programs`, and ``held`` bytes of each
    rank's inputs, of all microbatches. ``apart`` is where weight gradients follow the others of an
    action by themselves. Workers look two actions ahead where there is one rank, else one.
    """
    ahead = (2 if order.schedule.ranks == 1 else 1) if lookahead is None else lookahead
    walk = _ScheduleWalk(
        order, sends, programs, apart, device.kind != "cpu", worker_seconds(device)
    )
    return walk.run(held, ahead)


@dataclass(slots=True, eq=False)
class _PlannedAction:
    """An action, or its weight gradients, on a rank; ``missing`` counts what it waits for.

    ``came`` is when the last of that was there, ``ready`` when its next piece can begin, None where
    the communication before it has not begun.
    """

    number: int
    stage: int
    work: int
    microbatch: int
    program: Program
    missing: int
    taking: float
    came: float = 0.0
    ready: float | None = None
    at: int = 0


@dataclass(slots=True)
class _ScheduleWalk:
    """The state while a step is laid out; `run` does it."""

    order: Order
    sends: Mapping[int, Sequence[StageMessage]]
    programs: Mapping[object, Program]
    apart: bool
    beside: bool
    device_seconds: float
    held: list[float] = field(default_factory=list)
    """Bytes of each rank, at first those of its inputs."""
    turns: list[deque[_PlannedAction]] = field(default_factory=list)
    by_key: dict[tuple[int, int, int], _PlannedAction] = field(default_factory=dict)
    free: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    most: list[float] = field(default_factory=list)
    line: list[float] = field(default_factory=list)
    """When the line of each rank's collectives is free."""
    lines: dict[tuple[int, int], float] = field(default_factory=dict)
    sums: list[list[tuple[float, float]]] = field(default_factory=list)
    """Gradients of each rank that are whole, to be put together."""
    blocks: list[set[float]] = field(default_factory=list)
    """Sizes of the shared memory from which each rank has sent gradients."""
    sent: dict[tuple[int, int, int], list[tuple[float, int]]] = field(default_factory=dict)
    """By giver, taker and pass: when a message more, or less, is held by the taker."""
    events: list[tuple[float, int]] = field(default_factory=list)
    lookahead: int = 1
    last: int = BACKWARD

    def run(self, inputs: Sequence[float], lookahead: int) -> Laid:
        ranks = self.order.schedule.ranks
        self.held, self.lookahead = [*inputs], lookahead
        self.last = WEIGHT if self.apart else BACKWARD
        self.free, self.busy, self.line = [0.0] * ranks, [0.0] * ranks, [0.0] * ranks
        self.most, self.sums = list(self.held), [[] for _ in range(ranks)]
        self.blocks = [set() for _ in range(ranks)]
        self.turns = [deque(self._turns(rank)) for rank in range(ranks)]
        self.by_key = {
            (turn.work, turn.stage, turn.microbatch): turn for turns in self.turns for turn in turns
        }
        self.events = [(0.0, rank) for rank in range(ranks)]
        while self.events:
            now, rank = heapq.heappop(self.events)
            if now >= self.free[rank]:
                self._advance(rank, now)
        for rank in range(ranks):
            self.held[rank] -= inputs[rank]
            self._put_together(rank)
        done = [max(free, line) for free, line in zip(self.free, self.line, strict=True)]
        under_way = {key: _most_at_once(events) for key, events in self.sent.items()}
        return Laid(done, self.busy, self.most, under_way)

    def _turns(self, rank: int) -> Iterator[_PlannedAction]:
        schedule = self.order.schedule
        missing, taking = dict[tuple[int, int], int](), dict[tuple[int, int], float]()
        for work, sent in self.sends.items():
            for message in sent:
                key = work, message.taker
                missing[key] = missing.get(key, 0) + 1
                taking[key] = taking.get(key, 0.0) + message.taking
        last = schedule.microbatches - 1
        for number, action in enumerate(schedule.actions[rank]):
            works = [LETTERS[action.kind]]
            if action.kind == "B" and self.apart and not schedule.splits_backward:
                works.append(WEIGHT)
            for work in works:
                key = work, action.stage
                name = (action.stage, work, True) if action.microbatch == last else key[::-1]
                yield _PlannedAction(
                    number,
                    action.stage,
                    work,
                    action.microbatch,
                    self.programs.get(name, ()),
                    missing.get(key, 0) + (work != FORWARD),
                    taking.get(key, 0.0),
                )

    def _advance(self, rank: int, now: float) -> None:
        """Begin what a rank can begin; else wait for what comes first."""
        turns = self.turns[rank]
        if not turns:
            return
        limit, soonest = turns[0].number + self.lookahead, None
        for turn in turns:
            if turn.number > limit:
                break
            if turn.taking:
                self._work(rank, now, turn.taking)
                turn.taking = 0.0
                return
            if turn.missing:
                continue
            if turn.ready is None:
                turn.ready = self._begin_line(rank, max(now, turn.came), turn)
            if turn.ready <= now:
                self._do(rank, now, turn)
                return
            soonest = turn.ready if soonest is None else min(soonest, turn.ready)
        if soonest is not None:
            heapq.heappush(self.events, (soonest, rank))

    def _begin_line(self, rank: int, now: float, turn: _PlannedAction) -> float:
        """When the communication before a turn's next piece is over, if it begins now."""
        line = turn.program[turn.at].line if turn.at < len(turn.program) else 0.0
        if line:
            now = self.line[rank] = max(now, self.line[rank]) + line
        return now

    def _work(self, rank: int, now: float, seconds: float) -> float:
        self.busy[rank] += seconds
        self.free[rank] = end = now + seconds
        heapq.heappush(self.events, (end, rank))
        return end

    def _do(self, rank: int, now: float, turn: _PlannedAction) -> None:
        """The next piece of a turn, and what follows from its end."""
        end = now
        if turn.program:
            piece = turn.program[turn.at]
            self.most[rank] = max(self.most[rank], self.held[rank] + piece.rise)
            self.held[rank] += piece.growth
            self.sums[rank] += piece.sums
            end = self._work(rank, now, piece.seconds)
            if piece.tail:
                self.line[rank] = max(end, self.line[rank]) + piece.tail
        turn.at += 1
        if turn.at < len(turn.program):
            turn.ready = self._begin_line(rank, end, turn)
        else:
            self.turns[rank].remove(turn)
            self._finish(rank, turn, end)
            if end == now:
                heapq.heappush(self.events, (end, rank))
        turns = self.turns[rank]
        actions = len(self.order.schedule.actions[rank])
        if not turns or turns[0].number + self.lookahead >= actions:
            self._put_together(rank)

    def _finish(self, rank: int, turn: _PlannedAction, end: float) -> None:
        """Let what others wait for come to them."""
        placement = self.order.schedule.placement
        for message in self.sends.get(turn.work, ()):
            if message.giver == turn.stage:
                there, other = end, placement[message.taker]
                if message.sending:
                    there = self._work(rank, there, message.sending)
                    end = there
                if other != rank:
                    line = rank, other
                    there = self.lines[line] = max(there, self.lines.get(line, 0.0)) + message.line
                self._come(turn.work, message.taker, turn.microbatch, there)
                self.sent.setdefault((message.giver, message.taker, turn.work), []).append((end, 1))
        if turn.work == self.last:
            for (_, taker, _), events in self.sent.items():
                if taker == turn.stage:
                    events.append((end, -1))
        following = {FORWARD: BACKWARD, BACKWARD: WEIGHT}.get(turn.work)
        if following is not None:
            self._come(following, turn.stage, turn.microbatch, end)

    def _come(self, work: int, stage: int, microbatch: int, at: float) -> None:
        turn = self.by_key.get((work, stage, microbatch))
        if turn is not None:
            turn.missing -= 1
            turn.came = max(turn.came, at)
            if not turn.missing:
                heapq.heappush(self.events, (turn.came, self.order.schedule.placement[stage]))

    def _put_together(self, rank: int) -> None:
        """The gradients that are whole, over all devices of a rank."""
        for seconds, nbytes in self.sums[rank]:
            self.held[rank] += nbytes
            if not self.beside and nbytes not in self.blocks[rank]:  # it is sent from a block
                self.blocks[rank].add(nbytes)
                self.held[rank] += nbytes
            self.most[rank] = max(self.most[rank], self.held[rank])
            busy = self.device_seconds
            if self.beside:
                self.line[rank] = max(self.free[rank], self.line[rank]) + seconds
            else:
                busy += seconds
            self._work(rank, self.free[rank], busy)
        self.sums[rank] = []
