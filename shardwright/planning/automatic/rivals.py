"""Plans by partitioners, against which what the search finds is held.

Comes in: what the search is of, and for how many microbatches. Goes out: `Rivals`: of each
partitioner its fastest plan that fits, with the schedules that are asked for, and why others are
none. They have what the search does not try: stages that are no ranges of nodes, stages of
different numbers of slots, nodes that several stages do again.

What always holds: each is a plan of stages that `plan(graph, cluster, policy)` makes with options
that are asked for, and is predicted as `predict` does. Of graphs of more than `FEW_NODES` nodes
schedules that lay stages on ranks alike share the stages of the first of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from shardwright.errors import PlanError
from shardwright.layout import Cluster
from shardwright.planning.automatic.candidates import Asked, Candidate
from shardwright.planning.automatic.contender import Contender
from shardwright.planning.automatic.shapes import Shape
from shardwright.planning.automatic.spreads import Spreads
from shardwright.planning.mesh import PIPELINE
from shardwright.planning.partitions.partitioned import (
    MIXED,
    PIPEDREAM,
    Machines,
    plan_by_partition,
)
from shardwright.planning.partitions.partitioners import PARTITIONERS
from shardwright.planning.plan import Plan
from shardwright.planning.predicted import Prediction
from shardwright.planning.prediction.predict import estimate_plan
from shardwright.planning.prediction.spreading import SpreadPlan, spread_of_plan
from shardwright.planning.training import Options

MOST_SLOTS = 16
MOST_NODES = 3000
"""On more slots, or of more nodes, partitioners take longer than the search."""
FEW_NODES = 200
"""Of more nodes only those of `LIGHT` are made, with one stage a rank if no schedule is given."""
LIGHT = ("metis", PIPEDREAM)
ROOMY = 4
"""Slots that have room for this many times all that a step keeps fit any stages of it."""
FREE_MODES = ("none", "full")
"""What is computed again, tried in this order, where it is not asked for."""


@dataclass(frozen=True, slots=True)
class Rival:
    """A partitioner's plan, its forward spread over its meshes, and what it takes."""

    policy: str
    plan: Plan
    options: Options
    found: SpreadPlan
    prediction: Prediction
    memory: int
    """Bytes that a slot may hold."""

    @property
    def contender(self) -> Contender:
        """What it is compared by."""
        return Contender(self._name(), self.prediction, self.options.recompute)

    @property
    def kept(self) -> int:
        """Bytes of activations on the slot that keeps the most."""
        return max(slot.memory.activations for slot in self.prediction.slots)

    @property
    def too_much(self) -> int:
        """Bytes that a slot would hold, or keep of activations, above what it may; 0 if it fits."""
        over = self.prediction.peak_memory - self.memory
        if self.options.memory is not None:
            over = max(over, self.kept - self.options.memory)
        return max(over, 0)

    def _name(self) -> str:
        staged, options = self.found.staged, self.options
        sizes = [len(slots) for slots in staged.slots]
        chunks = len(staged.placement) // len(sizes)
        shape = Shape(len(sizes))
        of = f", of {', '.join(map(str, sizes))} slots" if max(sizes) > 1 else ""
        candidate = Candidate(shape, options.schedule, chunks, options.microbatches, 0)
        return f"{self.policy}: {candidate}{of}"


@dataclass(slots=True)
class Rivals:
    """The partitioners' plans of a graph; `run` makes them."""

    spreads: Spreads
    cluster: Cluster
    asked: Asked
    microbatches: int
    best: dict[str, Rival] = field(default_factory=dict)
    """Of each partitioner the fastest plan that fits."""
    made: list[Rival] = field(default_factory=list)
    """All plans that fit."""
    refused: dict[str, str] = field(default_factory=dict)
    """Partitioners of which no plan fits, and why."""
    left_out: str = ""
    """Why no plans were made."""
    _machines: Machines = field(init=False)

    def __post_init__(self) -> None:
        memory = float(self.cluster.device.memory)
        self._machines = Machines(self.cluster, self.spreads.costs, memory)

    def run(self) -> Rivals:
        """Make them, where that is cheap."""
        policies = self._policies()
        if others := [name for name in PARTITIONERS if name not in policies]:
            self.left_out = f"not compared with {', '.join(others)}: {self._why_not()}"
        for policy in policies:
            for group in self._groups(policy):
                self._add(policy, group)
        return self

    def _policies(self) -> Sequence[str]:
        slots, nodes = len(self.cluster.devices), len(self.spreads.graph.nodes)
        if slots > MOST_SLOTS or nodes > MOST_NODES or self.asked.zero:
            return ()
        return LIGHT if self._is_large() else [*PARTITIONERS]

    def _is_large(self) -> bool:
        return len(self.spreads.graph.nodes) > FEW_NODES

    def _why_not(self) -> str:
        """Why not all plans were made."""
        slots, nodes = len(self.cluster.devices), len(self.spreads.graph.nodes)
        if self.asked.zero:
            return "zero=1 is for meshes with an axis 'data'"
        if slots > MOST_SLOTS:
            return f"{slots} slots, and on more than {MOST_SLOTS} that takes long"
        most = MOST_NODES if nodes > MOST_NODES else FEW_NODES
        return f"{nodes} nodes, and of more than {most} that takes long"

    # --- what is asked of a partitioner -------------------------------------------------------

    def _groups(self, policy: str) -> Iterator[list[Options]]:
        """Options whose schedules lay stages on ranks alike, as what is asked for allows."""
        slots = len(self.cluster.devices)
        if slots == 1:
            return
        if not self.spreads.training:
            yield [Options()]
            return
        alike: dict[tuple[int, ...], list[Options]] = {}
        free = self.asked.schedule is None and self.asked.chunks is None
        for kind, chunks in self.asked.schedules(slots):
            if free and chunks > 1 and self._is_large():
                continue
            one = replace(
                self.asked.options(), microbatches=self.microbatches, schedule=kind, chunks=chunks
            )
            placement = one.schedule_on(slots).placement
            if (policy != PIPEDREAM or chunks == 1) and (policy != MIXED or chunks > 1):
                alike.setdefault(placement, []).append(one)
        yield from alike.values()

    def _add(self, policy: str, group: Sequence[Options]) -> None:
        """Keep the fastest that fits of some schedules that lay stages on ranks alike."""
        try:
            shared = self._is_large() or self._roomy()
            found = [*(self._shared if shared else self._each)(policy, group)]
        except PlanError as error:
            self.refused.setdefault(policy, str(error))
            return
        for rival in found:
            if rival.too_much:
                self.refused.setdefault(policy, _too_full(rival))
                continue
            self.made.append(rival)
            if policy not in self.best or _faster(rival, self.best[policy]):
                self.best[policy] = rival

    def _roomy(self) -> bool:
        """Whether memory has no say in where stages are cut."""
        whole = self.spreads.over(Shape(1), self.microbatches)
        kept = self.microbatches * float(whole.saved.size.sum())
        held = sum(float(size.sum()) for size in (whole.stored.size, whole.gradient, whole.state))
        free = self.asked.recompute in (None, "none")
        return free and ROOMY * (held + kept) < self.cluster.device.memory

    def _shared(self, policy: str, group: Sequence[Options]) -> Iterator[Rival]:
        """All schedules with the stages of the first: memory has no say in them, or little."""
        first = self._fitting(policy, group[0])
        if first is None:
            return
        yield first
        recompute, memory = first.options.recompute, first.options.memory
        for options in group[1:]:
            yield self._under(first, replace(options, recompute=recompute, memory=memory))

    def _each(self, policy: str, group: Sequence[Options]) -> Iterator[Rival]:
        for options in group:
            found = self._fitting(policy, options)
            if found is not None:
                yield found

    def _fitting(self, policy: str, options: Options) -> Rival | None:
        """The plan in which as little is computed again as fits; None where there is none."""
        modes = FREE_MODES if self.asked.recompute is None else (self.asked.recompute,)
        found: Rival | None = None
        for mode in modes if self.spreads.training else ("none",):
            try:
                found = self._make(policy, replace(options, recompute=mode))
            except PlanError as error:
                self.refused.setdefault(policy, str(error))
                continue
            if not found.too_much:
                freely = self.asked.recompute is None and mode == "full"
                return self._less_again(found) if freely else found
        return found

    def _less_again(self, full: Rival) -> Rival:
        """The plan in which what has room is kept, instead of all being computed again."""
        least = self._under(full, replace(full.options, recompute="auto", memory=1))
        held = [slot.memory for slot in least.prediction.slots]
        left = min(self.cluster.device.memory - (one.total - one.activations) for one in held)
        if left < max(1, *(one.activations for one in held)):
            return full
        found = self._under(full, replace(full.options, recompute="auto", memory=left))
        return found if not found.too_much and _faster(found, full) else full

    # --- making them --------------------------------------------------------------------------

    def _make(self, policy: str, options: Options) -> Rival:
        """A partitioner's plan as `plan` makes it. Raises PlanError."""
        graph, costs, memory = self.spreads.graph, self.spreads.costs, self.cluster.device.memory
        axes = {PIPELINE: len(self.cluster.devices)}
        sources = self.spreads.sources
        plan = plan_by_partition(graph, axes, policy, self._machines, options, sources)
        found = spread_of_plan(graph, plan, self.cluster, costs, sources)
        prediction = estimate_plan(found, self.cluster).prediction()
        return Rival(policy, plan, options, found, prediction, memory)

    def _under(self, rival: Rival, options: Options) -> Rival:
        """The same stages under another schedule of the same ranks, or with more done again."""
        assert rival.plan.training is not None
        training = msgspec.structs.replace(
            rival.plan.training,
            schedule=options.schedule,
            recompute=options.recompute,
            memory=options.memory,
        )
        staged = replace(rival.found.staged, options=options)
        found = replace(rival.found, staged=staged)
        return replace(
            rival,
            plan=msgspec.structs.replace(rival.plan, training=training),
            options=options,
            found=found,
            prediction=estimate_plan(found, self.cluster).prediction(),
        )


def _faster(one: Rival, other: Rival) -> bool:
    return one.prediction.step_time < other.prediction.step_time


def _too_full(rival: Rival) -> str:
    return f"its fullest slot would hold {rival.too_much} bytes more than it may"
