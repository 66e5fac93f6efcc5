"""The tasks of each stage of a cut, with their seconds and with the memory that they hold.

Input: `PlacedCosts`, and the stage of each node. Output: `StageTasks`: what a device does for
one microbatch, cut in tasks where building cuts it (at communication, and between blocks), and what
it holds before, in and behind each task. Memory is the liveness of storages: one is held from when
it is made, or from the beginning of the pass that it comes to from another stage, until its last
reader is done; what is made and read within one task is let go at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardwright.costs.placed import (
    ADD,
    AGAIN,
    BACKWARD,
    FORWARD,
    WEIGHT,
    Bools,
    Floats,
    Integers,
    PlacedCosts,
    first_of_each,
)

COLUMN = np.array([0, 0, 1, 1, 2])
"""Of `PlacedCosts.seconds`, that of each pass."""


class Sent(NamedTuple):
    """What a stage sends another for a microbatch, and how many of the values have gradients."""

    giver: int
    taker: int
    values: int
    bytes: float
    answers: int
    answer_bytes: float


@dataclass(frozen=True)
class StageTasks:
    """A row for each task of one microbatch, in order, stage by stage.

    stage, work
        Whose it is, and whether it is of the forward, the backward, or weight gradients.
    seconds, lines, moves
        Seconds of computing; seconds of the communication before it, and how many that is.
    before, most, behind
        Bytes held before it, at the most in it, and behind it, of all that is not stored.
    kept, brought, buffers
        Of each stage: bytes held between forward and backward; of them what communication brought;
        and what it sends from, one of each size.
    of_node
        The task of each node's gradients of stored values; -1 where it has none.
    """

    placed: PlacedCosts
    stages: Integers
    count: int
    stage: Integers
    work: Integers
    seconds: Floats
    lines: Floats
    moves: Integers
    before: Floats
    most: Floats
    behind: Floats
    kept: Floats
    brought: Floats
    buffers: Floats
    of_node: Integers


def stage_tasks(
    placed: PlacedCosts,
    stages: Sequence[int] | Integers,
    count: int,
    *,
    apart: bool,
    again: Floats | None = None,
) -> StageTasks:
    """The tasks of ``count`` stages.

    ``apart`` is where weight gradients are made behind all other gradients of a stage; ``again``
    is how much of what each stage can do again (`PlacedCosts.again`) it does.
    """
    at = np.asarray(stages, dtype=np.int64)
    line = _PassOrder.of(placed, at, apart=apart, again=again)
    task = np.cumsum(line.begins) - 1
    starts = np.flatnonzero(line.begins)
    births, deaths = _lives(placed, at, line, task, again)
    held = np.cumsum(births) - np.cumsum(deaths)
    inside = held + deaths
    ends = _ends(starts, len(task))
    behind = held[ends]
    before = np.where(starts > 0, held[starts - 1], 0.0)
    stage, work = line.stage[starts], line.group[starts]
    forward = np.flatnonzero(work == FORWARD)
    kept = np.zeros(count)
    kept[stage[forward]] = behind[forward]  # the last one of each stage stands
    read = placed.inputs[:, 3] > 0
    if again is not None:
        readers = placed.inputs[:, 1].astype(np.int64)
        read |= placed.again[readers] & (again[at[readers]] > 0)
    kept += input_bytes(placed.inputs[read], at, count)
    moved = placed.moved.in_stages(at)
    moves_in = at[moved.node]
    brought = np.flatnonzero(moved.work == FORWARD)
    of_node = np.full(len(at), -1)
    last = WEIGHT if apart else BACKWARD
    rows = np.flatnonzero(line.work == last)
    of_node[line.node[rows]] = task[rows]

    def total(numbers: Floats | Integers) -> Floats:
        return np.asarray(np.add.reduceat(numbers, starts) if len(starts) else numbers)

    return StageTasks(
        placed=placed,
        stages=at,
        count=count,
        stage=stage,
        work=work,
        seconds=total(line.seconds),
        lines=total(line.lines),
        moves=total(line.moves).astype(np.int64),
        before=before,
        most=np.maximum.reduceat(inside, starts) if len(starts) else inside,
        behind=behind,
        kept=kept,
        brought=added(moves_in[brought], placed.size[moved.storage[brought]], count),
        buffers=_one_of_each_size(moves_in, moved.sent, count),
        of_node=of_node,
    )


def _one_of_each_size(stages: Integers, nbytes: Floats, count: int) -> Floats:
    """Bytes of a buffer of each size, by stage."""
    found = np.unique(np.stack([stages, nbytes]), axis=1)
    return added(found[0].astype(np.int64), found[1], count)


def input_bytes(rows: Floats, groups: Integers, count: int) -> Floats:
    """Bytes of the inputs of the graph in some rows, each once in each group of nodes."""
    number, node = rows[:, :2].astype(np.int64).T
    first = first_of_each(groups[node], number)
    return added(groups[node[first]], rows[first, 2], count)


def added(groups: Integers, numbers: Floats, count: int) -> Floats:
    """The sum of the numbers of each group."""
    return np.bincount(groups, weights=numbers, minlength=count).astype(np.float64)


# --- when things are done -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _PassOrder:
    """The passes of all nodes in the order in which they are done, stage by stage.

    A backward goes from the last block to the first; in each, what is done again comes first.
    ``place`` has the row of each node in each pass; -1 where there is none.
    """

    stage: Integers
    node: Integers
    work: Integers
    group: Integers
    """The pass as tasks have it: what is done again is of the backward."""
    begins: Bools
    """Where a task begins."""
    pass_begins: Integers
    pass_ends: Integers
    seconds: Floats
    lines: Floats
    moves: Integers
    place: Integers

    @classmethod
    def of(
        cls, placed: PlacedCosts, stages: Integers, *, apart: bool, again: Floats | None
    ) -> _PassOrder:
        source, count = placed.source, len(stages)
        each = np.ones(count, dtype=bool)
        each[[*source.prepare]] = False
        nodes = np.flatnonzero(each)
        block = source.block
        number = np.arange(count)
        first = np.searchsorted(block, block, side="left")
        stop = np.searchsorted(block, block, side="right")
        behind = count + 2 * (count - stop)
        backward = behind + 2 * (stop - first) - 1 - number + first
        last = 4 * count - 1 - number
        times = np.stack((number, behind + number - first, backward, backward + 0.5, last))
        works = [FORWARD]
        if source.training:
            works += [BACKWARD] + [WEIGHT] * apart
        rows = [nodes for _ in works]
        if source.training:
            works.append(ADD)
            rows.append(np.unique(placed.node[placed.work == ADD]))
        if again is not None:
            works.append(AGAIN)
            rows.append(np.flatnonzero(placed.again & (again[stages] > 0)))
        node = np.concatenate(rows)
        work = np.concatenate(
            [np.full(len(row), w) for row, w in zip(rows, works, strict=True)]
        ).astype(np.int64)
        order = np.lexsort((times[work, node], stages[node]))
        node, work = node[order], work[order]
        group = np.array([FORWARD, BACKWARD, BACKWARD, BACKWARD, WEIGHT])[work]
        stage, seconds = stages[node], placed.seconds[node, COLUMN[work]]
        seconds = np.where(work == ADD, 0.0, seconds)  # they are among those of the backward
        if again is not None:
            seconds = seconds * np.where(work == AGAIN, again[stage], 1.0)
        if not apart:
            seconds = seconds + np.where(work == BACKWARD, placed.seconds[node, 2], 0.0)
        changes = _changes(stage) | _changes(group)
        place = np.full((len(times), count), -1)
        place[work, node] = np.arange(len(node))
        moved = placed.moved.in_stages(stages)
        before = place[moved.work, moved.node]
        lines = added(before, moved.seconds, len(node))
        moves = np.bincount(before, minlength=len(node))
        passes = np.cumsum(changes) - 1
        pass_starts = np.flatnonzero(changes)
        return cls(
            stage,
            node,
            work,
            group,
            changes | _changes(block[node]) | (moves > 0),
            pass_starts[passes],
            _ends(pass_starts, len(node))[passes],
            seconds,
            lines,
            moves,
            place,
        )


def _ends(starts: Integers, count: int) -> Integers:
    """The last row of each run of rows, of so many in all."""
    return np.append(starts, count)[1:] - 1


def _changes(numbers: Integers) -> Bools:
    """Where a number is another than before it."""
    return np.asarray(np.diff(numbers, prepend=-1) != 0)


# --- what is held ---------------------------------------------------------------------------------


def _lives(
    placed: PlacedCosts, stages: Integers, line: _PassOrder, task: Integers, again: Floats | None
) -> tuple[Floats, Floats]:
    """Bytes that begin to be held with each row of the timeline, and that end with it.

    What is made again is two storages, in the forward and in the backward. Where a part of a stage
    is done ``again``, each storage counts in part as if all of it were, and else as if nothing was.
    """
    work = placed.work
    rows = np.flatnonzero(line.place[_as_done(line, work), placed.node] >= 0)
    node, storage = placed.node[rows], placed.storage[rows]
    where = line.place[_as_done(line, work[rows]), node]
    maker = placed.maker[storage]
    mine, made_in = stages[node], stages[maker]
    block, count = placed.source.block, len(placed.size)
    if again is not None:
        anew = placed.redone[storage] & (work[rows] != FORWARD)
        anew &= (block[maker] == block[node]) & (made_in == mine)
        rest = np.flatnonzero((work[rows] != AGAIN) & (again < 1).any())
        storage = np.concatenate([storage + anew * count, storage[rest] + 2 * count])
        mine, where, made_in = (np.append(a, a[rest]) for a in (mine, where, made_in))
    order = np.lexsort((where, storage, mine))
    storage, mine, where, made_in = (a[order] for a in (storage, mine, where, made_in))
    starts = np.flatnonzero(_changes(mine) | _changes(storage))
    first, last = where[starts], where[_ends(starts, len(where))]
    here = made_in[starts] == mine[starts]
    begin = np.where(here, first, line.pass_begins[first])
    inside = here & (task[first] == task[last])
    ends = _ends(np.flatnonzero(line.begins), len(task))
    end = np.where(inside, last, ends[task[last]])
    elsewhere = np.bincount(storage[starts])[storage[starts]] > 1
    end = np.where(here & elsewhere, np.maximum(end, line.pass_ends[first]), end)
    sizes = placed.size[storage[starts] % max(count, 1)]
    if again is not None:
        part = again[mine[starts]]
        sizes = sizes * np.where(storage[starts] < 2 * count, part, 1 - part)
    return added(begin, sizes, len(task)), added(end, sizes, len(task))


def _as_done(line: _PassOrder, work: Integers) -> Integers:
    """The pass in which a node's work is done: weight gradients may be made in the backward."""
    return np.where((work == WEIGHT) & (line.place[WEIGHT] < 0).all(), BACKWARD, work)


# --- between stages -------------------------------------------------------------------------------


def traffic(placed: PlacedCosts, stages: Integers) -> list[Sent]:
    """What stages send each other: each value once to each stage that reads it."""
    passed = placed.passed
    givers, takers = stages[passed.maker], stages[passed.reader]
    rows = np.flatnonzero(givers != takers)
    rows = rows[first_of_each(takers[rows], passed.value[rows])]
    found: dict[tuple[int, int], list[float]] = {}
    for row in rows.tolist():
        sums = found.setdefault((int(givers[row]), int(takers[row])), [0, 0.0, 0, 0.0])
        size, answered = float(passed.size[row]), bool(passed.has_gradient[row])
        sums[0] += 1
        sums[1] += size
        sums[2] += answered
        sums[3] += size if answered else 0.0
    return [Sent(*pair, int(n), b, int(m), a) for pair, (n, b, m, a) in sorted(found.items())]


def least_seconds(tasks: StageTasks, placement: Sequence[int], microbatches: int) -> float:
    """Seconds that a step of this cut takes at least, whatever the order of its schedule.

    A rank begins when the first microbatch has come through the stages before one of its own, and
    does the work of all its stages on every microbatch. When it has done its last backward, the
    gradients go back through the stages before. Work for weight gradients (``tasks`` have it apart)
    may stand behind that.
    """
    count = tasks.count
    works = np.zeros((3, count))
    np.add.at(works, (COLUMN[tasks.work], tasks.stage), tasks.seconds)
    begin, tail = np.zeros(count), np.zeros(count)
    for sent in sorted(traffic(tasks.placed, tasks.stages), key=lambda one: one.giver):
        begin[sent.taker] = max(begin[sent.taker], begin[sent.giver] + works[0, sent.giver])
        if sent.answers:
            tail[sent.taker] = max(tail[sent.taker], tail[sent.giver] + works[1, sent.giver])
    least = 0.0
    for rank in range(max(placement) + 1):
        stages = [stage for stage, at in enumerate(placement) if at == rank]
        forward, backward, weight = works[:, stages].sum(axis=1)
        both = microbatches * (forward + backward)
        both += min(begin[stage] for stage in stages)
        behind = min(tail[stage] for stage in stages)
        least = max(least, both + microbatches * weight, both + behind)
    return float(least)
