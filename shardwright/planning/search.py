"""The search for the fastest plan: meshes, cuts, schedules, and what is done again.

Input: a graph, a cluster, and the options that are given. Output: `Candidate` plans that fit,
the fastest first. Options that are not given are searched for, all but the number of microbatches:
the batch of a step is the captured one, unless more of them are asked for.

Settings are tried, the most promising first, whose lower bound is below the fastest (branch and
bound): a device does its share of the work on every microbatch, and of the update. Of their cuts
those are laid out in time whose own bound does not rule them out: a rank begins when the first
microbatch has come through the stages before it, does all its work, and what goes back from it
passes these stages again (`least_seconds`). So nothing that is left out is faster, of the cuts that
are tried.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shardwright.clusters import Cluster
from shardwright.costs.placed import Floats, Integers, PlacedCosts, first_of_each
from shardwright.costs.predict import (
    estimate,
    least_memory,
    left_for_activations,
    update_seconds,
)
from shardwright.costs.stage import StageTasks, least_seconds, stage_tasks
from shardwright.costs.step_time import Order, order_of
from shardwright.errors import PlanError
from shardwright.planning.candidates import (
    STAGES,
    Candidate,
    Setting,
    nearest_text,
    too_many_stages,
)
from shardwright.planning.cuts import NodeLine, cuts, first_readers
from shardwright.planning.options import StepOptions
from shardwright.planning.partition import Task
from shardwright.planning.partitioners import by_metis
from shardwright.planning.rules import DATA
from shardwright.planning.shapes import PlacedShapes, Shape, shapes, variants
from shardwright.planning.step import with_prepared
from shardwright.schedules.make import SEARCHED

OTHERS = 4
"""How many plans are given beside the fastest."""
# --- the search -----------------------------------------------------------------------------------


@dataclass
class PlanSearch:
    """A search; `run` gives what it found. ``given`` are the options that are not searched for."""

    graphs: PlacedShapes
    cluster: Cluster
    given: Mapping[str, Any] = field(default_factory=dict)
    candidates: list[Candidate] = field(default_factory=list)
    """All that were laid out in time."""
    refused: dict[Shape, str] = field(default_factory=dict)
    """Shapes that cannot be, and why."""
    crowded: dict[Setting, float] = field(default_factory=dict)
    """Settings that hold too much at least, and the bytes that a slot would need for that."""
    too_many: dict[Setting, str] = field(default_factory=dict)
    """Settings of more virtual stages than can be, and why."""
    best: Candidate | None = None
    branched: list[Candidate] = field(default_factory=list)
    """The fastest with METIS's stages instead, where that is not predicted to be faster."""
    _cuts: dict[object, list[Integers]] = field(default_factory=dict)
    _tasks: dict[object, StageTasks] = field(default_factory=dict)
    _lines: dict[object, NodeLine] = field(default_factory=dict)
    _bounds: dict[Setting, float] = field(default_factory=dict)
    _looked: set[Setting] = field(default_factory=set)

    @property
    def microbatches(self) -> int:
        """How many batches of the captured size a step takes."""
        return self.graphs.microbatches

    def run(self) -> list[Candidate]:
        """The fastest plan, then the fastest others. Raises PlanError where none fits."""
        self._search(shapes(self.cluster))
        if self.best is None:
            raise PlanError(self._nothing())
        self._search(dict.fromkeys(v for found in self.fastest() for v in variants(found.shape)))
        for found in self.fastest():
            self._try_branches(found)
        for setting in self._settings(self.best.shape):  # what a person would compare it with
            if setting not in self._looked:
                self._look(setting, math.inf)
        return self.fastest()

    def fastest(self) -> list[Candidate]:
        """The fastest that fit, each once as they are told apart."""
        distinct: dict[str, Candidate] = {}
        for found in sorted(self.candidates, key=lambda one: one.seconds):
            if found.fits:
                distinct.setdefault(str(found), found)
        return [*distinct.values()][: 1 + OTHERS]

    def _search(self, tried: Iterator[Shape] | Mapping[Shape, None]) -> None:
        """Look at the settings of shapes whose bounds are low enough, the most promising first."""
        waiting: list[tuple[float, int, Setting, bool]] = []
        serial = self.graphs.on(Shape(1)).seconds.sum() * self.microbatches
        for shape in tried:
            for setting in self._settings(shape):
                if serial / shape.slots < self._limit():
                    least = serial / shape.slots * self._bubble(setting)
                    waiting.append((least, len(waiting), setting, False))
        heapq.heapify(waiting)
        while waiting:
            _, i, setting, is_close = heapq.heappop(waiting)
            bound = self.bound(setting)
            if bound >= self._limit():
                continue
            if is_close:
                self._look(setting, self._limit())
            else:
                lines = self.microbatches * float(self.graphs.on(setting.shape).lines.sum())
                promise = (bound + lines / setting.shape.pipeline) * self._bubble(setting)
                heapq.heappush(waiting, (promise, i, setting, True))

    def _bubble(self, setting: Setting) -> float:
        """How many times its work a step of even stages takes in a usual schedule."""
        return 1 + (setting.shape.pipeline - 1) / setting.chunks / self.microbatches

    def _order(self, setting: Setting) -> Order:
        return order_of(setting.schedule, setting.shape.pipeline, self.microbatches, setting.chunks)

    def _limit(self) -> float:
        return math.inf if self.best is None else self.best.estimate.step_time

    def _settings(self, shape: Shape) -> Iterator[Setting]:
        training, zero = self.graphs.training, self.given.get("zero")
        if training and zero and shape.shards == 1:
            self.refused[shape] = f"zero=1 needs a mesh axis {DATA!r}"
            return
        zeros = [0] if not training or shape.shards == 1 else [0, 1] if zero is None else [zero]
        schedules = self._schedules(shape.pipeline) if training else [SEARCHED[0]]
        for schedule, chunks in schedules:
            for number in zeros:
                yield Setting(shape, schedule, chunks, number)

    def _schedules(self, ranks: int) -> list[tuple[str, int]]:
        """Kinds of schedules to try, with their chunks."""
        kind, chunks = self.given.get("schedule"), self.given.get("chunks")
        if ranks == 1 and kind is None and chunks is None:
            return [SEARCHED[0]]
        found = [one for one in SEARCHED if kind in (None, one[0]) and chunks in (None, one[1])]
        if chunks is not None and (kind or "interleaved", chunks) not in SEARCHED:
            found.append((kind or "interleaved", chunks))
        return found

    # --- bounds -------------------------------------------------------------------------------

    def bound(self, setting: Setting) -> float:
        """Seconds that a step takes at least, however it is cut; infinite where it cannot be."""
        if setting not in self._bounds:
            self._bounds[setting] = self._bound(setting)
        return self._bounds[setting]

    def _bound(self, setting: Setting) -> float:
        shape = setting.shape
        try:
            placed = self.graphs.on(shape)
        except PlanError as error:
            self.refused[shape] = str(error)
            return math.inf
        nodes = len(placed.seconds) - len(placed.source.prepare)
        if setting.stages > min(nodes, STAGES):
            self.too_many[setting] = too_many_stages(setting, nodes)
            return math.inf
        needed = self._least_memory(placed, setting)
        if needed > self.cluster.device.memory:
            self.crowded[setting] = needed
            return math.inf
        work = self.microbatches * float(placed.seconds.sum()) + self._update(placed, setting)
        return work / shape.pipeline

    def _least_memory(self, placed: PlacedCosts, setting: Setting) -> float:
        """The bytes of stored values, gradients and states that the fullest slot has at least."""
        held = placed.stored
        shards = setting.shape.shards if setting.zero else 1
        size = held.size + held.gradient + held.state / shards
        rows = first_of_each(np.zeros_like(held.number), held.number)
        return float(size[rows].sum()) / setting.shape.pipeline

    def _update(self, placed: PlacedCosts, setting: Setting) -> float:
        """Seconds of the update of every parameter once."""
        held = placed.stored
        shards = setting.shape.shards if setting.zero else 1
        rows = first_of_each(np.zeros_like(held.number), held.number)
        device = self.cluster.device
        return float(update_seconds(held.gradient[rows], held.state[rows], shards, device).sum())

    def _tasks_of(
        self, placed: PlacedCosts, stages: Integers, count: int, *, again: bool = False
    ) -> StageTasks:
        """The tasks of a cut, weight gradients by themselves; all is done ``again``, or nothing."""
        key = id(placed), count, stages.tobytes(), again
        if key not in self._tasks:
            shares = np.ones(count) if again else None
            self._tasks[key] = stage_tasks(placed, stages, count, apart=True, again=shares)
        return self._tasks[key]

    # --- a setting looked at in full ----------------------------------------------------------

    def _look(self, setting: Setting, limit: float) -> None:
        """A setting with its cuts, as little done again as fits."""
        if math.isinf(self.bound(setting)):
            return
        self._looked.add(setting)
        modes = ("none", "auto", "full") if self.graphs.training else ("none",)
        if self.given.get("recompute") is not None:
            modes = (self.given["recompute"],)
        for mode in modes:
            found = [*self._in_mode(setting, mode, limit)]
            self.candidates += found
            for one in found:
                if one.fits and (self.best is None or one.seconds < self.best.seconds):
                    self.best = one
            if any(one.fits for one in found):
                return

    def _in_mode(
        self, setting: Setting, mode: str, limit: float, *, fitting: bool = True
    ) -> Iterator[Candidate]:
        """The setting with each cut that may take less than ``limit``, and that may fit.

        Those that cannot fit are among them if not ``fitting``.
        """
        shape, placed = setting.shape, self.graphs.on(setting.shape)
        slots = [mesh.devices for mesh in shape.ranks(self.cluster)]
        options = StepOptions(
            self.microbatches,
            setting.schedule,
            setting.chunks,
            mode,
            self.given.get("memory") if mode == "auto" else None,
            setting.zero,
        )
        tried = self._cut(placed, setting, again=mode == "full")
        bounds = [self._least(placed, stages, setting, again=mode == "full") for stages in tried]
        for least, stages in sorted(zip(bounds, tried, strict=True), key=lambda pair: pair[0]):
            if least >= limit:
                return
            if fitting and not self._may_fit(placed, stages, setting, again=mode != "none"):
                continue
            if mode == "auto" and options.memory is None:
                memory = left_for_activations(
                    placed, stages, replace(options, memory=0), self.cluster, slots, [shape.shards]
                )
                if memory is None:
                    continue
                found = replace(options, memory=memory)
            else:
                found = options
            candidate = self._candidate(shape, found, placed, stages)
            if candidate.fits:
                limit = min(limit, candidate.estimate.step_time)
            yield candidate

    def _may_fit(
        self, placed: PlacedCosts, stages: Integers, setting: Setting, *, again: bool
    ) -> bool:
        """Whether what a cut holds at least fits, where all or nothing is done ``again``."""
        if not self.graphs.training:
            return True
        tasks = self._tasks_of(placed, stages, setting.stages, again=again)
        order = self._order(setting)
        needed = least_memory(tasks, order, setting.shape.shards if setting.zero else 1)
        if needed <= self.cluster.device.memory:
            return True
        self.crowded[setting] = min(needed, self.crowded.get(setting, math.inf))
        return False

    def _least(
        self, placed: PlacedCosts, stages: Integers, setting: Setting, *, again: bool
    ) -> float:
        """Seconds that a cut takes at least."""
        if not self.graphs.training or setting.stages == 1:
            return 0.0
        tasks = self._tasks_of(placed, stages, setting.stages, again=again)
        order = self._order(setting)
        return least_seconds(tasks, order.schedule.placement, self.microbatches)

    def _candidate(
        self, shape: Shape, options: StepOptions, placed: PlacedCosts, stages: Integers
    ) -> Candidate:
        slots = [mesh.devices for mesh in shape.ranks(self.cluster)]
        placement = [*range(shape.pipeline)]
        found = estimate(
            placed,
            stages,
            options,
            self.cluster,
            slots,
            placement=placement,
            shards=[shape.shards],
        )
        return Candidate(shape, options, placed, stages, found, self.cluster.device.memory)

    def _cut(self, placed: PlacedCosts, setting: Setting, *, again: bool) -> list[Integers]:
        """Cuts to try; they do not depend on the schedule while all fits."""
        held, memory = self._held(placed, setting, again=again)
        key = id(placed), setting.stages, setting.zero, again, held, memory
        if key not in self._cuts:
            line = self._line(placed, setting, again=again)
            self._cuts[key] = [*cuts(line, setting.stages, held, memory)]
        return self._cuts[key]

    def _line(self, placed: PlacedCosts, setting: Setting, *, again: bool) -> NodeLine:
        """What cuts are made in."""
        key = id(placed), setting.zero, again
        if key not in self._lines:
            forward = placed.seconds[:, 0] + placed.lines[:, 0]
            seconds = placed.total + np.where(placed.again & again, forward, 0.0)
            once = placed.once + self._updates(placed, setting)
            seconds = seconds + once / self.microbatches
            self._lines[key] = NodeLine.of(placed, seconds, self.cluster, again=again)
        return self._lines[key]

    def _updates(self, placed: PlacedCosts, setting: Setting) -> Floats:
        """Seconds of the update of each parameter, at the node that is the first to read it."""
        held = placed.stored
        shards = setting.shape.shards if setting.zero else 1
        seconds = update_seconds(held.gradient, held.state, shards, self.cluster.device)
        return first_readers(held.number, held.node, seconds, len(placed.seconds))

    def _held(
        self, placed: PlacedCosts, setting: Setting, *, again: bool
    ) -> tuple[tuple[float, ...], float]:
        """How many microbatches each stage holds, and its memory, where that may not be enough."""
        held, memory = placed.stored, self.cluster.device.memory
        stored = float((held.size + held.gradient + held.state).sum())
        kept = float(placed.size[np.unique(placed.storage[placed.kept_rows(again=again)])].sum())
        if not self.graphs.training or stored + self.microbatches * kept < memory:
            return (), math.inf
        order = self._order(setting)
        return order.most_held, memory / setting.chunks

    def _try_branches(self, found: Candidate) -> None:
        """The candidate with METIS's stages, among the others where it is predicted to be faster.

        Cuts are of a line in the order of the graph's nodes, in which branches stand one after
        another.
        """
        shape, options, step = found.shape, found.options, None
        count = shape.pipeline * (options.chunks or 1)
        if count == 1:
            return
        if self.graphs.training:
            step = self.graphs.step(shape).graph
        view = found.placed.source.view
        order = order_of(options.schedule, shape.pipeline, self.microbatches, options.chunks)
        task = Task(
            view,
            order.schedule.placement,
            self.cluster,
            self.graphs.costs,
            step,
            len(found.placed.source.prepare),
            slots=shape.slots // shape.pipeline,
            shards=shape.shards,
        )
        try:
            stages = by_metis(task).stages
        except PlanError:
            return
        at = np.array(with_prepared(view, stages), dtype=np.int64)
        if np.array_equal(at, found.stages):
            return
        other = replace(self._candidate(shape, options, found.placed, at), partitioner="METIS")
        if not other.fits:
            return
        if other.seconds >= found.seconds:
            self.branched.append(other)
            return
        self.candidates.append(other)
        if self.best is None or other.seconds < self.best.seconds:
            self.best = other

    # --- nothing fits -------------------------------------------------------------------------

    def _nothing(self) -> str:
        """Which slot lacks how many bytes in the plan that comes nearest."""
        name = self.graphs.graph.name
        for setting in sorted(self.crowded, key=self.crowded.__getitem__)[:1]:
            again = "full" if self.graphs.training else "none"
            mode = self.given.get("recompute") or again
            self.candidates += self._in_mode(setting, mode, math.inf, fitting=False)
        if not self.candidates:
            reasons = dict.fromkeys(self.refused.values())
            for setting in sorted(self.too_many, key=lambda one: one.stages)[:1]:
                reasons[self.too_many[setting]] = None
            return f"no plan for {name!r}: {'; '.join(reasons) or 'no mesh has its options'}"
        nearest = min(self.candidates, key=lambda one: one.too_much)
        return nearest_text(name, nearest, len(self.cluster.devices))
