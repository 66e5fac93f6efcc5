"""The search for the best plan: mesh shapes, cuts, schedules, microbatches, what is done again.

Comes in: the spreads of a graph, a cluster, and what is asked for. Goes out: `Found` plans, the
best first. Candidates are tried in the order of a lower bound of what a sample takes in them: its
work dealt out evenly, and the shortest wait that a schedule has at its ends. What cannot beat the
best so far is not looked at further.

How much a sample takes falls with the number of microbatches for ever, ever less. Where the number
is free, it is the smallest of `MICROBATCHES` with which a sample takes at most `ENOUGH` times what
it takes with the best of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shardwright.clusters import Cluster
from shardwright.costs.worker_time import worker_seconds
from shardwright.errors import PlanError
from shardwright.planning.automatic.candidates import Asked, Candidate, Found, nearest_text
from shardwright.planning.automatic.cutting import NodeLine, cuts, first_readers, side_by_side
from shardwright.planning.automatic.shapes import Shape, shapes, variants
from shardwright.planning.automatic.spreads import SEVERAL, Spreads
from shardwright.planning.options import StepOptions
from shardwright.planning.partition import Task
from shardwright.planning.prediction.memory import left_for_activations
from shardwright.planning.prediction.predict import estimate, lends
from shardwright.planning.prediction.source import Floats, Integers
from shardwright.planning.prediction.spread import Spread
from shardwright.planning.prediction.sums import sums_of
from shardwright.planning.prediction.timing import order_of
from shardwright.planning.prediction.update import update_seconds
from shardwright.planning.rules import DATA

ENOUGH = 1.01
BUBBLE = 0.4
"""The share of a stage's work on a microbatch that every schedule has it wait at a step's ends."""
PROMISE = 0.995
"""Only what may take less than this times the best is looked at."""
TOLD_APART = 0.98
"""How much faster other stages of the same candidate must be predicted, for that to be believed."""
SINGLE = 0.98
"""A step of one microbatch takes at least this much of what one of several would with one of them:
they differ in their losses, which are means or quotients of sums."""
STAGES = 128
"""More virtual stages are not tried."""
MOST_OTHERS = 12
"""Of so many other shapes, in the order of their bounds, those that fit are looked for."""
OTHERS = 3
"""How many other shapes are looked at in full, and how many other plans are given."""
FORWARD_ONLY = ("1f1b", 1)
"""What stands for the schedule of a model, whose stages follow one another."""


@dataclass
class PlanSearch:
    """A search; `run` gives what it found."""

    spreads: Spreads
    cluster: Cluster
    asked: Asked
    tried: dict[Candidate, Found | None] = field(default_factory=dict)
    refused: dict[Shape, str] = field(default_factory=dict)
    """Shapes that cannot be, and why."""
    crowded: dict[Candidate, float] = field(default_factory=dict)
    """Candidates whose parameters alone do not fit, and the bytes that a slot would need."""
    too_many: dict[Candidate, str] = field(default_factory=dict)
    """Candidates of more virtual stages than can be, and why."""
    _bounds: dict[Candidate, float] = field(default_factory=dict)
    _near: dict[Candidate, float] = field(default_factory=dict)
    """Bounds of single microbatches from what several take."""
    _cuts: dict[object, list[Integers]] = field(default_factory=dict)
    _ranks: dict[Shape, Sequence[Sequence[str]]] = field(default_factory=dict)
    _lines: dict[object, NodeLine] = field(default_factory=dict)
    """By the id of a spread, and what else a line depends on."""
    _updates: dict[object, Floats] = field(default_factory=dict)
    """What a step takes once, by the id of a spread and whether states are dealt out."""
    _full: dict[object, Found | None] = field(default_factory=dict)
    _serial: float = 0.0

    def run(self) -> list[Found]:
        """The best plan, then the three best others with as many microbatches.

        Raises PlanError where none fits.
        """
        candidates = list(self._candidates())
        best = self._best(candidates)
        if best is None:
            raise PlanError(self._nothing())
        best = self._fewest_microbatches(candidates, best)
        others = self._other_shapes(candidates, best)
        best = self._best(self._of_variants([best, *others]), best.seconds) or best
        return self._fastest(best)

    def _candidates(self) -> Iterator[Candidate]:
        for shape in shapes(self.cluster):
            yield from self._of_shape(shape, self.asked.counts(self.spreads.training))

    def _of_variants(self, found: Sequence[Found]) -> Iterator[Candidate]:
        """Other splits over meshes that were found, with as many microbatches as the best."""
        count = found[0].candidate.microbatches
        for one in found:
            for shape in variants(one.candidate.shape):
                yield from self._of_shape(shape, (count,))

    def _of_shape(self, shape: Shape, counts: Sequence[int]) -> Iterator[Candidate]:
        training = self.spreads.training
        if training and self.asked.zero and shape.shards == 1:
            self.refused[shape] = f"zero=1 needs a mesh axis {DATA!r}"
            return
        zeros = (0, 1) if self.asked.zero is None else (self.asked.zero,)
        schedules = self.asked.schedules(shape.pipeline) if training else (FORWARD_ONLY,)
        for schedule, chunks in schedules:
            for count in counts:
                for zero in zeros if training and shape.shards > 1 else (0,):
                    yield Candidate(shape, schedule, chunks, count, zero)

    # --- the order in which candidates are tried ----------------------------------------------

    def _best(self, candidates: Iterable[Candidate], below: float = np.inf) -> Found | None:
        """The best of some candidates of which a sample takes less than ``below``."""
        waiting = [
            (self._known_bound(candidate), i, candidate) for i, candidate in enumerate(candidates)
        ]
        heapq.heapify(waiting)
        best: Found | None = None
        while waiting and waiting[0][0] < below * PROMISE:
            _, i, candidate = heapq.heappop(waiting)
            if candidate not in self._bounds:
                heapq.heappush(waiting, (self._closer_bound(candidate), i, candidate))
                continue
            if candidate not in self.tried:
                self.tried[candidate] = self.look(candidate)
            found = self.tried[candidate]
            if found is not None and found.fits and found.seconds < below:
                best, below = found, found.seconds
        return best

    def _fewest_microbatches(self, candidates: Sequence[Candidate], best: Found) -> Found:
        """The best with the fewest microbatches that are enough."""
        for count in self.asked.counts(self.spreads.training):
            if count < best.candidate.microbatches:
                fewer = [found for found in candidates if found.microbatches == count]
                enough = self._best(fewer, ENOUGH * best.seconds)
                if enough is not None:
                    return enough
        return best

    def _other_shapes(self, candidates: Sequence[Candidate], best: Found) -> list[Found]:
        """Of other shapes those of the lowest bounds that fit, with as many microbatches."""
        count = best.candidate.microbatches
        by_shape: dict[Shape, list[Candidate]] = {}
        for candidate in candidates:
            if candidate.microbatches == count and candidate.shape != best.candidate.shape:
                by_shape.setdefault(candidate.shape, []).append(candidate)
        bounds = {shape: min(map(self._known_bound, found)) for shape, found in by_shape.items()}
        others: list[Found] = []
        for shape in sorted(by_shape, key=bounds.__getitem__)[:MOST_OTHERS]:
            found = self._first_that_fits(by_shape[shape]) if len(others) < OTHERS else None
            others += [found] if found is not None else []
        return others

    def _fastest(self, best: Found) -> list[Found]:
        """The best of all that fits with as many microbatches, the fastest first.

        The best one's shape is looked at under all schedules.
        """
        count = best.candidate.microbatches
        for candidate in self._of_shape(best.candidate.shape, (count,)):
            if candidate not in self.tried and self._bound(candidate, count) < np.inf:
                self.tried[candidate] = self.look(candidate)
        looked_at = (found for found in self.tried.values() if found is not None and found.fits)
        alike = (found for found in looked_at if found.candidate.microbatches == count)
        distinct: dict[tuple[str, str], Found] = {}
        for found in sorted([best, *alike], key=lambda found: found.seconds):
            distinct.setdefault((str(found.candidate), found.options.recompute), found)
        return list(distinct.values())[: 1 + OTHERS]

    def _first_that_fits(self, candidates: Sequence[Candidate]) -> Found | None:
        """The candidate of the lowest bound that fits."""
        for candidate in candidates:
            if candidate not in self._bounds:
                self._bounds[candidate] = self._bound(candidate, candidate.microbatches)
        for candidate in sorted(candidates, key=self._bounds.__getitem__):
            if self._bounds[candidate] == np.inf:
                break
            if candidate not in self.tried:
                self.tried[candidate] = self.look(candidate)
            found = self.tried[candidate]
            if found is not None and found.fits:
                return found
        return None

    def _known_bound(self, candidate: Candidate) -> float:
        """The closest bound that is known."""
        for known in (self._bounds, self._near):
            if candidate in known:
                return known[candidate]
        return self._rough_bound(candidate)

    def _closer_bound(self, candidate: Candidate) -> float:
        """A closer bound than is known; the closest is in `_bounds` then.

        A step of one microbatch is another graph than one of several. It is made ready only where
        one microbatch may be worth it.
        """
        alike = candidate.microbatches == 1 and not candidate.shape.best
        if alike and self.asked.microbatches is None and candidate not in self._near:
            self._near[candidate] = SINGLE * self._bound(candidate, SEVERAL)
            if self._near[candidate] < np.inf:
                return self._near[candidate]
        self._bounds[candidate] = self._bound(candidate, candidate.microbatches)
        return self._bounds[candidate]

    def _rough_bound(self, candidate: Candidate) -> float:
        """What a sample takes at least on so many slots that share the work of one."""
        if not self._serial:
            one = self.spreads.over(Shape(1))
            self._serial = float(one.seconds.sum())
        if candidate.shape in self.refused:
            return np.inf
        waiting = (candidate.shape.pipeline - 1) / candidate.chunks / candidate.microbatches
        bubble = BUBBLE * waiting if self.spreads.training else 0.0
        return self._serial / candidate.shape.slots * (1 + bubble)

    def _bound(self, candidate: Candidate, like: int) -> float:
        """What a sample takes at least on this mesh if the stages are equal.

        Nodes are those of a step of ``like`` microbatches.
        """
        shape, count = candidate.shape, candidate.microbatches
        try:
            spread = self.spreads.over(shape, like)
        except PlanError as error:
            self.refused[shape] = str(error)
            return np.inf
        nodes = len(spread.once) - len(spread.source.prepare)
        if candidate.stages > min(nodes, STAGES):
            self.too_many[candidate] = _too_many(candidate, nodes)
            return np.inf
        needed = self._least_memory(spread, candidate)
        if needed > self.cluster.device.memory:
            self.crowded[candidate] = needed
            return np.inf
        once = float(self._once(spread, candidate).sum())
        at_work = (count * float(spread.seconds.sum()) + once) / shape.pipeline
        ends = float((spread.forward + spread.backward).sum())
        if not self.spreads.training:
            return at_work / count
        return (at_work + (shape.pipeline - 1) / candidate.stages * ends) / count

    @staticmethod
    def _least_memory(spread: Spread, candidate: Candidate) -> float:
        """The bytes of stored values, gradients and states that the fullest slot has at least."""
        count = len(spread.once)
        shards = candidate.shape.shards if candidate.zero else 1
        size = spread.stored.size + spread.gradient + spread.state / shards
        stored = float(first_readers(spread.stored._replace(size=size), count).sum())
        return stored / candidate.shape.pipeline

    def _once(self, spread: Spread, candidate: Candidate) -> Floats:
        """Seconds of each node that a step takes once, the update of its parameters included."""
        key = id(spread), candidate.zero
        if key not in self._updates:
            shards = candidate.shape.shards if candidate.zero else 1
            device = self.cluster.device
            seconds = update_seconds(spread.gradient, spread.state, shards, device)
            updates = first_readers(spread.stored._replace(size=seconds), len(spread.once))
            beside = worker_seconds(self.cluster.device) * spread.gathered
            self._updates[key] = spread.once + updates + beside
        return self._updates[key]

    # --- a candidate looked at in full --------------------------------------------------------

    def look(self, candidate: Candidate) -> Found | None:
        """A candidate with its best cut, as little done again as fits; None where there is none."""
        modes = (
            ("none", "auto", "full") if self.asked.recompute is None else (self.asked.recompute,)
        )
        if not self.spreads.training:
            modes = ("none",)
        if len(modes) > 1 and (crowded := self._too_full(candidate)) is not None:
            return crowded
        least: Found | None = None
        for mode in modes:
            for found in self._in_mode(candidate, mode):
                if least is None or _better(found, least):
                    least = found
            if least is not None and least.fits:
                return self._side_by_side(least)
        return least

    def _too_full(self, candidate: Candidate) -> Found | None:
        """The candidate with all activations computed again, where not even that fits.

        It is looked at once for all numbers of microbatches of which stages hold as many.
        """
        spread = self.spreads.over(candidate.shape, candidate.microbatches)
        held, _ = self._held(spread, candidate, np.inf)
        key = candidate.shape, candidate.stages, candidate.zero, held
        if key not in self._full:
            self._full[key] = self._fullest(candidate)
        return self._full[key]

    def _fullest(self, candidate: Candidate) -> Found | None:
        """Its cut that lacks the least; None where one fits. How long they take is not asked."""
        least: Found | None = None
        for found in self._in_mode(candidate, "full", timed=False):
            if found.fits:
                return None
            if least is None or found.peak < least.peak:
                least = found
        return least

    def _in_mode(self, candidate: Candidate, mode: str, *, timed: bool = True) -> Iterator[Found]:
        """The candidate with each cut that is tried; of plans not ``timed`` the memory is known."""
        spread = self.spreads.over(candidate.shape, candidate.microbatches)
        options = StepOptions(
            candidate.microbatches,
            candidate.schedule,
            candidate.chunks,
            mode,
            self.asked.memory if mode == "auto" else None,
            candidate.zero,
        )
        for stages in self._cut(spread, candidate, again=mode == "full"):
            if mode == "auto" and self.asked.memory is None:
                memory = self._left_for_activations(spread, stages, options, candidate)
                if memory is None:
                    continue
                yield self._found(spread, stages, replace(options, memory=memory), candidate)
            else:
                yield self._found(spread, stages, options, candidate, timed=timed)

    def _found(
        self,
        spread: Spread,
        stages: Integers,
        options: StepOptions,
        candidate: Candidate,
        *,
        timed: bool = True,
    ) -> Found:
        slots = self._slots(candidate.shape)
        memory = self.cluster.device.memory
        limit = memory if timed else -1
        found = estimate(spread, stages, options, self.cluster, slots, memory=limit)
        return Found(candidate, spread, stages, options, found, memory)

    def _slots(self, shape: Shape) -> Sequence[Sequence[str]]:
        """Those of each rank."""
        if shape not in self._ranks:
            self._ranks[shape] = [mesh.devices for mesh in shape.ranks(self.cluster)]
        return self._ranks[shape]

    def _left_for_activations(
        self, spread: Spread, stages: Integers, options: StepOptions, candidate: Candidate
    ) -> int | None:
        """The bytes that the fullest slot has left for activations if some are computed again."""
        order = order_of(
            candidate.schedule, candidate.shape.pipeline, candidate.microbatches, candidate.chunks
        )
        sums = sums_of(spread, stages, candidate.stages)
        least = replace(options, memory=0)
        memory, shards = self.cluster.device.memory, candidate.shape.shards
        return left_for_activations(sums, order, least, shards, memory, lends=lends(self.cluster))

    def _cut(self, spread: Spread, candidate: Candidate, *, again: bool) -> list[Integers]:
        """Cuts to try; those of one stage a rank do not depend on the schedule while all fits."""
        once = self._once(spread, candidate)
        count = candidate.microbatches if self._matters(once, spread, candidate) else 0
        kept = spread.crossing if again else spread.saved
        held, memory = self._held(spread, candidate, float(first_readers(kept, len(once)).sum()))
        single = candidate.microbatches == 1
        key = candidate.shape, candidate.stages, single, again, count, held, memory
        if key not in self._cuts:
            line = self._line(spread, candidate, count, again=again)
            self._cuts[key] = list(cuts(line, candidate.stages, held, memory))
        return self._cuts[key]

    def _side_by_side(self, found: Found) -> Found:
        """The candidate with branches of the graph side by side, where that is faster."""
        candidate, shape, step = found.candidate, found.candidate.shape, None
        if candidate.stages == 1:
            return found
        count = candidate.microbatches
        if self.spreads.training:
            _, unfused = self.spreads.apart(shape)
            step = self.spreads.sources.step(unfused, count, shape.shards).graph
        order = order_of(candidate.schedule, shape.pipeline, count, candidate.chunks)
        stages = side_by_side(
            found.spread,
            Task(
                found.spread.source.view,
                order.schedule.placement,
                self.cluster,
                self.spreads.costs,
                step,
                len(found.spread.source.prepare),
                slots=shape.slots // shape.pipeline,
                shards=shape.shards,
            ),
        )
        if stages is None:
            return found
        other = self._found(found.spread, stages, found.options, candidate)
        return other if other.fits and other.seconds < TOLD_APART * found.seconds else found

    def _line(self, spread: Spread, candidate: Candidate, count: int, *, again: bool) -> NodeLine:
        """What cuts are made in; what is done once a step counts where ``count`` is given."""
        key = id(spread), candidate.zero, count, again
        if key not in self._lines:
            seconds = spread.seconds + (spread.again if again else 0.0)
            if count:
                seconds = seconds + self._once(spread, candidate) / count
            kept = spread.crossing if again else spread.saved
            self._lines[key] = NodeLine.of(spread, seconds, kept, self.cluster)
        return self._lines[key]

    @staticmethod
    def _matters(once: Floats, spread: Spread, candidate: Candidate) -> bool:
        """Whether what is done once a step weighs."""
        return bool(once.sum() > 0.01 * candidate.microbatches * spread.seconds.sum())

    def _held(
        self, spread: Spread, candidate: Candidate, kept: float
    ) -> tuple[tuple[float, ...], float]:
        """How many microbatches each stage holds, and its memory, where that may not be enough."""
        stored = float(sum(map(np.sum, (spread.stored.size, spread.gradient, spread.state))))
        memory = self.cluster.device.memory
        if not self.spreads.training or stored + candidate.microbatches * kept < memory:
            return (), np.inf
        order = order_of(
            candidate.schedule, candidate.shape.pipeline, candidate.microbatches, candidate.chunks
        )
        return order.most_held, memory / candidate.chunks

    # --- nothing fits -------------------------------------------------------------------------

    def _nothing(self) -> str:
        """Which slot lacks how many bytes in the plan that comes nearest."""
        for candidate in sorted(self.crowded, key=self.crowded.__getitem__)[:1]:
            self.tried[candidate] = self.look(candidate)
        found = [one for one in self.tried.values() if one is not None]
        if not found:
            return f"no plan for {self.spreads.graph.name!r}: {self._not_possible()}"
        nearest = min(found, key=lambda one: one.too_much)
        return nearest_text(self.spreads.graph.name, nearest, len(self.cluster.devices))

    def _not_possible(self) -> str:
        """Why no candidate can be looked at."""
        reasons = dict.fromkeys(self.refused.values())
        for candidate in sorted(self.too_many, key=lambda one: one.stages)[:1]:
            reasons[self.too_many[candidate]] = None
        return "; ".join(reasons) or "no mesh has its options"


def _too_many(candidate: Candidate, nodes: int) -> str:
    """Why a graph of so many nodes has no such plan."""
    limit = f"the {nodes} nodes of the graph" if nodes <= STAGES else f"{STAGES}, the most tried"
    return (
        f"{candidate.shape.pipeline} pipeline ranks with {candidate.chunks} chunks each are "
        f"{candidate.stages} virtual stages, more than {limit}; take fewer chunks or slots"
    )


def _better(one: Found, other: Found) -> bool:
    """What fits before what does not; then what takes less time, or holds less."""
    if one.fits != other.fits:
        return one.fits
    return one.seconds < other.seconds if one.fits else one.too_much < other.too_much
