"""What each virtual stage of a partition takes, holds and sends, summed over its nodes.

Comes in: a `Spread` and the stage of each node. Goes out: `Sums`. What always holds: a value that
several nodes of a stage keep, hold or receive counts there once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardwright.planning.prediction.source import Floats, Integers, Pairs
from shardwright.planning.prediction.spread import Spread
from shardwright.schedules.held import ENOUGH_TO_WAIT


class Sent(NamedTuple):
    """What a stage sends another for a microbatch, and how many of the values have gradients."""

    giver: int
    taker: int
    values: int
    bytes: float
    answers: int
    answer_bytes: float


@dataclass(frozen=True)
class Sums:
    """Of each virtual stage, on one slot.

    Seconds for a microbatch are ``forward``, ``backward``, ``weight`` and ``again``, what is
    computed again where all is; ``once`` is for a step. Bytes for a microbatch are ``saved``,
    ``crossing`` (what is kept where all else is computed again), ``waiting`` (what is left for
    gradients of weights that are made apart), and of what communication inside the mesh brings all
    (``fetched``) and one value of each size (``sizes``).

    Bytes that a backward has in hand at the most, besides: ``working`` where all is saved (it lets
    go of that on its way), ``redoing`` where a block is computed again, ``leaving`` besides what
    then waits for gradients of weights, and ``ending`` with gradients that were put together.
    """

    spread: Spread
    stages: Integers
    count: int
    forward: Floats
    backward: Floats
    weight: Floats
    once: Floats
    again: Floats
    saved: Floats
    crossing: Floats
    waiting: Floats
    working: Floats
    redoing: Floats
    leaving: Floats
    ending: Floats
    fetched: Floats
    sizes: Floats
    traffic: Sequence[Sent]
    blocks: Integers
    """How many blocks have nodes in each stage: each is a supertask."""
    brought: Integers
    """How many values communication inside the mesh brings each stage in a forward."""


def sums_of(spread: Spread, stages: Sequence[int] | Integers, count: int) -> Sums:
    """What ``count`` stages take, given the stage of each node."""
    at = np.asarray(stages, dtype=np.int64)

    def total(numbers: Floats) -> Floats:
        return added(at, numbers, count)

    saved = distinct(spread.saved, at)
    crossing = distinct(_kept(spread, at), at)
    waiting = distinct(spread.waiting, at)
    hand = _in_hand(spread, at, count, crossing)
    return Sums(
        spread=spread,
        stages=at,
        count=count,
        forward=total(spread.forward),
        backward=total(spread.backward),
        weight=total(spread.weight),
        once=total(spread.once),
        again=total(spread.again),
        saved=_by_group(saved, count),
        crossing=_by_group(crossing, count),
        waiting=_by_group(waiting, count),
        working=hand.working,
        redoing=hand.redoing,
        leaving=hand.leaving,
        ending=hand.ending,
        fetched=added(at[spread.fetched.node], spread.fetched.size, count),
        sizes=_one_of_each_size(spread.fetched, at, count),
        traffic=_traffic(spread, at),
        blocks=_blocks(spread, at, count),
        brought=np.bincount(at[spread.fetched.node], minlength=count),
    )


def distinct(pairs: Pairs, groups: Integers) -> Pairs:
    """Each value once in each group of nodes; ``node`` is then the group."""
    found = groups[pairs.node]
    _, first = np.unique(_key(found, pairs.number), return_index=True)
    return Pairs(pairs.number[first], found[first], pairs.size[first])


def _key(groups: Integers, numbers: Integers) -> Integers:
    return groups * (int(numbers.max(initial=0)) + 1) + numbers


def added(groups: Integers, numbers: Floats, count: int) -> Floats:
    """The sum of the numbers of each group."""
    return np.bincount(groups, weights=numbers, minlength=count).astype(np.float64)


def _by_group(pairs: Pairs, count: int) -> Floats:
    return added(pairs.node, pairs.size, count)


def _kept(spread: Spread, stages: Integers) -> Pairs:
    """What is kept where all else is computed again: what is reread of other blocks or stages."""
    made, passed = spread.made, spread.passed
    arrives = stages[made] != stages[passed.node]
    found = (
        spread.crossing,
        Pairs(*(column[arrives & spread.reread] for column in passed)),
        Pairs(*(column[~arrives & spread.fixed] for column in passed._replace(node=made))),
    )
    return Pairs(*(np.concatenate(columns) for columns in zip(*found, strict=True)))


def _one_of_each_size(pairs: Pairs, stages: Integers, count: int) -> Floats:
    """Bytes of a value of each size, by the stage of the node that reads it."""
    found = np.unique(np.stack([stages[pairs.node], pairs.size]), axis=1)
    return added(found[0].astype(np.int64), found[1], count)


def _blocks(spread: Spread, stages: Integers, count: int) -> Integers:
    """How many blocks have nodes in each stage, beside those that run once a step."""
    each = np.ones(len(stages), dtype=bool)
    each[list(spread.source.prepare)] = False
    blocks = int(spread.block.max(initial=0)) + 1
    found = np.unique(stages[each] * blocks + spread.block[each])
    return np.bincount(found // blocks, minlength=count)


class _Hand(NamedTuple):
    """What backwards have in hand at the most, by stage: as in `Sums`."""

    working: Floats
    redoing: Floats
    leaving: Floats
    ending: Floats


def _in_hand(spread: Spread, stages: Integers, count: int, crossing: Pairs) -> _Hand:
    """A backward goes from the last block to the first, each a supertask.

    What is saved is let go behind a block; with its last reader what is computed again in one, and
    where communication cuts blocks in many supertasks.
    """
    blocks = int(spread.block.max(initial=0)) + 1
    groups = stages * blocks + spread.block
    total = count * blocks

    def by_block(numbers: Floats) -> Floats:
        return numbers.reshape(count, blocks)

    def most(at: Floats) -> Floats:
        found = np.zeros(total)
        np.maximum.at(found, groups, at)
        return by_block(found)

    new = _first_read(spread.saved, stages)
    held = np.cumsum(by_block(added(groups, new, total)), axis=1)
    working = (held + most(spread.working)).max(axis=1) - held[:, -1]
    if len(spread.fetched.node):
        brought = added(stages[spread.fetched.node], spread.fetched.size, count)
        cut = most(_on_the_way(new, stages, count) + spread.working).max(axis=1) - held[:, -1]
        often = brought > ENOUGH_TO_WAIT * held[:, -1]
        working = np.where(often, np.maximum(cut, 0.0), working)
    others = _without(spread.saved, stages, crossing)
    redoing = most(_on_the_way(_first_read(others, groups), groups, total) + spread.working)
    waiting = by_block(_by_group(distinct(spread.waiting, groups), total))
    gathered = by_block(_by_group(distinct(gathered_gradients(spread), groups), total))
    later = np.cumsum(gathered[:, ::-1], axis=1)[:, ::-1] - gathered
    return _Hand(
        working,
        redoing.max(axis=1),
        np.maximum(redoing - waiting, 0.0).max(axis=1),
        (later + np.maximum(redoing, gathered)).max(axis=1),
    )


def gathered_gradients(spread: Spread) -> Pairs:
    """The gradients of stored values that communication puts together, once a step."""
    stored = spread.stored._replace(size=spread.gradient)
    which = (spread.gathered[stored.node] > 0) & (stored.size > 0)
    return stored.where(which)


def _first_read(saved: Pairs, groups: Integers) -> Floats:
    """Bytes of what is saved in each group of nodes, at the first of them that reads it."""
    _, first = np.unique(_key(groups[saved.node], saved.number), return_index=True)
    return added(saved.node[first], saved.size[first], len(groups))


def _on_the_way(new: Floats, groups: Integers, count: int) -> Floats:
    """Of numbers at nodes the sum of those of a node's group up to the node."""
    order = np.argsort(groups, kind="stable")
    sums = np.cumsum(new[order])
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    before = np.zeros(count)
    before[groups[order[starts]]] = sums[starts] - new[order[starts]]
    found = np.empty(len(groups))
    found[order] = sums
    return found - before[groups]


def _without(saved: Pairs, stages: Integers, kept: Pairs) -> Pairs:
    """Rows of what is saved that a stage does not keep where all else is computed again."""
    most = int(max(saved.number.max(initial=0), kept.number.max(initial=0))) + 1
    here, there = stages[saved.node] * most + saved.number, kept.node * most + kept.number
    return saved.where(~np.isin(here, there))


def _traffic(spread: Spread, stages: Integers) -> list[Sent]:
    """What stages send each other: each value once to each stage that reads it."""
    passed = spread.passed
    givers, takers = stages[spread.made], stages[passed.node]
    rows = np.flatnonzero(givers != takers)
    _, first = np.unique(_key(takers[rows], passed.number[rows]), return_index=True)
    found: dict[tuple[int, int], list[float]] = {}
    for row in rows[first].tolist():
        sums = found.setdefault((int(givers[row]), int(takers[row])), [0, 0.0, 0, 0.0])
        size, answered = float(passed.size[row]), bool(spread.answered[row])
        sums[0] += 1
        sums[1] += size
        sums[2] += answered
        sums[3] += size if answered else 0.0
    return [Sent(*pair, int(n), b, int(m), a) for pair, (n, b, m, a) in sorted(found.items())]
