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
    ``crossing`` (what is kept where all else is computed again), ``block`` (the most that one block
    keeps besides), ``working``, ``received``, and of what communication inside the mesh brings all
    (``fetched``) and one value of each size (``sizes``).
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
    block: Floats
    working: Floats
    received: Floats
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
    traffic = _traffic(spread, at)
    received = np.zeros(count)
    for sent in traffic:
        received[sent.taker] += sent.bytes
        received[sent.giver] += sent.answer_bytes
    working = np.zeros(count)
    np.maximum.at(working, at, spread.working)
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
        crossing=_by_group(distinct(_kept(spread, at), at), count),
        block=_fullest_block(spread, at, count),
        working=working,
        received=received,
        fetched=added(at[spread.fetched.node], spread.fetched.size, count),
        sizes=_one_of_each_size(spread.fetched, at, count),
        traffic=traffic,
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


def _fullest_block(spread: Spread, stages: Integers, count: int) -> Floats:
    """The most bytes that one block of a stage keeps for its backward."""
    blocks = int(spread.block.max(initial=0)) + 1
    groups = stages * blocks + spread.block
    found = _by_group(distinct(spread.saved, groups), count * blocks)
    return np.asarray(found.reshape(count, blocks).max(axis=1))


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
