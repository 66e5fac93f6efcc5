"""What a slot holds at most, item by item.

Comes in: the sums of a partition's stages, and the order of its schedule. Goes out: a `SlotMemory`
for each pipeline rank, and how many seconds of work are done again where activations do not fit.

A slot is fullest at one of three times: when a backward is to begin; behind a backward, where
gradients of weights are made later; or at the end of a step, when gradients have been put together
and stand beside their sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.planning.options import StepOptions
from shardwright.planning.predicted import SlotMemory
from shardwright.planning.prediction.source import Floats, Integers
from shardwright.planning.prediction.sums import Sums, added, distinct, gathered_gradients
from shardwright.planning.prediction.timing import Order
from shardwright.schedules.held import HeldMicrobatches, waits_inside

__all__ = ["SlotMemory", "left_for_activations", "rank_memory"]


def rank_memory(
    sums: Sums, order: Order, options: StepOptions, shards: int, *, lends: bool = False
) -> tuple[list[SlotMemory], list[float]]:
    """What a slot of each rank holds, and each stage's seconds of work that is done again.

    ``lends`` is where messages stand in memory that slots share: it stays with who sent them, too.
    """
    again = [0.0] * sums.count
    found = []
    for one in _ranks(sums, order, options, shards, lends=lends):
        for stage, seconds in zip(one.kept.stages, one.kept.again, strict=True):
            again[stage] = seconds
        found.append(one.memory())
    return found, again


def left_for_activations(
    sums: Sums, order: Order, options: StepOptions, shards: int, memory: int, *, lends: bool = False
) -> int | None:
    """The bytes that the fullest slot has left for activations if some are computed again.

    None where it has too few for what has to be kept.
    """
    found = [*_ranks(sums, order, options, shards, lends=lends)]
    left = memory - max(one.memory().total - round(one.kept.counted) for one in found)
    return left if left >= max(1, *(round(one.kept.counted) for one in found)) else None


def _ranks(
    sums: Sums, order: Order, options: StepOptions, shards: int, *, lends: bool
) -> Iterator[_Rank]:
    schedule = order.schedule
    ranks = np.array(schedule.placement, dtype=np.int64)[sums.stages]
    held = _held(sums, ranks, schedule.ranks, shards if options.zero else 1)
    messages = _messages(sums, order, lends=lends)
    gathered = _gathered(sums, schedule.placement, schedule.ranks)
    for rank, stored in enumerate(held):
        kept = _Kept(sums, schedule.stages_of(rank), order, rank, options)
        yield _Rank(stored, kept, messages[rank], gathered[rank])


@dataclass(frozen=True, slots=True)
class _Rank:
    """What a slot of a rank holds.

    ``stored`` are values, gradients, states and what is updated; ``ending`` is what it holds
    besides at the end of a step where gradients are put together.
    """

    stored: tuple[int, int, int, int]
    kept: _Kept
    messages: float
    ending: float

    def memory(self) -> SlotMemory:
        """When it holds the most.

        Of gradients that are put together those count that need more room than activations leave.
        """
        parameters, gradients, optimizer, updated = self.stored
        activations = self.kept.counted
        temporaries = max(self.kept.most - activations, 0.0)
        more = max(self.ending - activations - temporaries, 0.0)
        return SlotMemory(
            parameters,
            gradients,
            optimizer,
            round(activations),
            round(temporaries),
            round(self.messages + more),
            updated,
        )


def _held(sums: Sums, ranks: Integers, count: int, shards: int) -> list[tuple[int, int, int, int]]:
    """Bytes of stored values, gradients, states and what is updated, by rank."""
    spread = sums.spread
    found = []
    for size in (spread.stored.size, spread.gradient, spread.state):
        pairs = distinct(spread.stored._replace(size=size), ranks)
        found.append(added(pairs.node, pairs.size, count))
    stored, gradient, state = found
    return [
        (round(a), round(b), round(c / shards), round(b / shards))
        for a, b, c in zip(stored.tolist(), gradient.tolist(), state.tolist(), strict=True)
    ]


def _gathered(sums: Sums, placement: Sequence[int], ranks: int) -> list[float]:
    """Bytes at the end of a step where slots put gradients together, by rank; else 0.

    Stages are done in the order of their backwards, the first of a rank the last of all: with what
    that has in hand. Of each size one more stands there, to be sent.
    """
    spread = sums.spread
    found = distinct(gathered_gradients(spread), sums.stages)
    done = added(found.node, found.size, sums.count)
    rank = np.asarray(placement, dtype=np.int64)
    sizes = np.unique(np.stack([rank[found.node], found.size]), axis=1)
    last = [placement.index(number) for number in range(ranks)]
    held = added(rank, done, ranks) - done[last]
    held += added(sizes[0].astype(np.int64), sizes[1], ranks) + sums.ending[last]
    return [float(nbytes) for nbytes in np.where(added(rank, done, ranks) > 0, held, 0.0)]


def _messages(sums: Sums, order: Order, *, lends: bool) -> list[float]:
    """Bytes of each rank of what stages send it for a microbatch, and what slots inside do.

    What is kept of it counts there. Where messages stand in shared memory, the giver has those of
    all the microbatches that the taker still holds.
    """
    placement = order.schedule.placement
    found = [0.0] * order.schedule.ranks
    for stage, nbytes in enumerate(sums.sizes.tolist()):
        found[placement[stage]] += nbytes
    for sent in sums.traffic:
        giver, taker = placement[sent.giver], placement[sent.taker]
        if giver == taker:
            continue
        found[giver] += sent.answer_bytes
        if not lends:
            found[taker] += sent.bytes
            continue
        there = order.under_way(sent.giver, sent.taker, "F")
        found[giver] += sent.bytes * there
        found[taker] += sent.bytes * max(there - order.most_held[sent.taker], 0.0)
        if sent.answers:
            found[taker] += sent.answer_bytes * order.under_way(sent.taker, sent.giver, "B")
    return found


class _Kept:
    """What a rank keeps of its forwards, and how long it takes to do the rest again.

    ``counted`` is what a budget for activations counts: what is kept, until all is done with it.
    ``most`` is that with what backwards have in hand besides, when one is to begin; or behind one,
    where gradients of weights are made later.
    """

    def __init__(
        self, sums: Sums, stages: Sequence[int], order: Order, rank: int, options: StepOptions
    ) -> None:
        numbers = list(stages)
        saved, crossing = sums.saved, sums.crossing
        if options.recompute == "auto":
            alone, also = _twice(sums, numbers)
            saved, crossing = saved + alone, crossing + also
        saved, crossing = saved[numbers], np.minimum(crossing, saved)[numbers]
        waits = waits_inside(sums.fetched[numbers].sum(), sums.saved[numbers].sum())
        held = HeldMicrobatches(order.held[rank], order.ahead[rank] if waits else None)
        most, least = held.most(saved), held.most(crossing)
        share = _share(options, most, least)
        working = sums.working[numbers]
        working = working + share * np.maximum(sums.redoing[numbers] - working, 0.0)
        self.stages = stages
        self.counted = most - share * (most - least)
        self.again = [share * float(sums.again[stage]) for stage in stages]
        """Seconds, by stage."""
        self.most = self.counted + float(working.max())
        if order.schedule.splits_backward:
            apart = _made_apart(sums)[numbers]
            kept = saved - share * (saved - crossing)
            each = np.concatenate([kept, np.where(apart, sums.waiting[numbers], kept)])
            before, behind = order.apart[rank].most(each, ahead=waits)
            leaving = np.where(apart, sums.leaving[numbers], working)
            self.most = max(before + float(working.max()), behind + float(leaving.max()))


def _made_apart(sums: Sums) -> NDArray[np.bool_]:
    """Stages whose backward gives something away: only there are weight gradients made later."""
    gives = sums.fetched > 0
    for sent in sums.traffic:
        if sent.answers:
            gives[sent.taker] = True
    return gives


def _twice(sums: Sums, stages: Sequence[int]) -> tuple[Floats, Floats]:
    """Bytes that a budget counts for their maker too: other stages of its rank reread them.

    First without what the maker's own backward reads, then with it.
    """
    saved, spread = sums.spread.saved, sums.spread
    maker = np.full(1 + max(saved.number.max(initial=0), spread.passed.number.max(initial=0)), -1)
    maker[spread.passed.number] = spread.made
    made = maker[saved.number]
    giver, taker = sums.stages[made], sums.stages[saved.node]
    lent = (made >= 0) & (giver != taker) & np.isin(giver, stages) & np.isin(taker, stages)
    own = np.isin(_pairs(giver, saved.number), _pairs(taker, saved.number))
    rows = saved._replace(node=made)

    def by_giver(which: NDArray[np.bool_]) -> Floats:
        found = distinct(rows.where(which), sums.stages)
        return added(found.node, found.size, sums.count)

    return by_giver(lent & ~own), by_giver(lent)


def _pairs(stages: Integers, numbers: Integers) -> Integers:
    """A number for each pair of a stage and a value."""
    return stages * (int(numbers.max(initial=0)) + 1) + numbers


def _share(options: StepOptions, most: float, least: float) -> float:
    """How much of what may be computed again is."""
    if options.recompute == "none" or most <= least:
        return 0.0
    if options.recompute == "full":
        return 1.0
    assert options.memory is not None
    return min(max((most - options.memory) / (most - least), 0.0), 1.0)
