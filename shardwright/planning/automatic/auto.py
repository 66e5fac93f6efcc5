"""The automatic planner: from a graph and a cluster to the plan that is predicted to be fastest.

Comes in: a model or training step, a `Cluster`, what nodes cost, and what is already decided. Goes
out: a `Plan` with its prediction and with what else was looked at: the fastest of what `search`
finds, which is written down here, and of what partitioners make (`rivals`). So none of these plans
is predicted to be faster; or, where a `judge` is asked about those that are predicted to be close,
none of those is by the simulator's measure.

A training step is captured with the shapes of one microbatch, and a plan of n microbatches makes a
step of n of them: plans with different n are compared by what one microbatch's samples take.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from shardwright.errors import PlanError, ShardwrightError
from shardwright.ir import IRGraph
from shardwright.ir.collection import without_collection
from shardwright.ir.quantities import count_text
from shardwright.layout import Cluster, Mesh
from shardwright.planning.assemble import make_plan
from shardwright.planning.automatic.candidates import Asked, Found
from shardwright.planning.automatic.contender import Contender
from shardwright.planning.automatic.explain import alternatives, done_whole, split_reasons
from shardwright.planning.automatic.rivals import FEW_NODES, Rival, Rivals
from shardwright.planning.automatic.search import Search
from shardwright.planning.automatic.spreads import SEVERAL, Spreads
from shardwright.planning.batch import batch_rows
from shardwright.planning.explanation import Explanation
from shardwright.planning.mesh import whole_notes
from shardwright.planning.plan import (
    Assignment,
    Plan,
    TrainingPlan,
    assignments,
)
from shardwright.planning.prediction.predict import predict
from shardwright.planning.prediction.timing import order_of
from shardwright.planning.step import check_one_backward
from shardwright.planning.training import measure_work, training_plan
from shardwright.profiling.cost import Analytic, Costs

if TYPE_CHECKING:
    from shardwright.planning.automatic.judge import Judge

AUTO = "auto"
FASTER = 1 - 1e-9
"""A partitioner's plan is taken where it takes less than this times what the search found."""
CLOSE = 1.12
"""The judge is asked about plans that are predicted to take up to this times the least, of graphs
of `FEW_NODES` at most: larger ones take long to build, and are predicted within 0.1%."""
JUDGED = 12
"""So many of them at most, the fastest first."""


@dataclass(frozen=True, slots=True)
class _Option:
    """What may be chosen: what the search found, or a partitioner's plan."""

    made: Found | Rival
    contender: Contender

    @property
    def preference(self) -> float:
        """Smaller is better: of equals, what the search found."""
        return self.contender.seconds / (FASTER if isinstance(self.made, Rival) else 1.0)


@without_collection()
def auto_plan(
    graph: IRGraph,
    cluster: Cluster,
    costs: Costs | None = None,
    asked: Asked | None = None,
    judge: Judge | None = None,
) -> Plan:
    """The plan for a graph that is predicted to be fastest on a cluster.

    For a small graph the ``judge`` says which of the plans is that are predicted to be close to
    the fastest. Raises PlanError where no plan fits, with what lacks in the nearest.
    """
    asked = asked or Asked()
    asked.check()
    spreads = Spreads(graph, cluster, costs or Analytic(cluster.device))
    if spreads.training:
        check_one_backward(graph)
    search = Search(spreads, cluster, asked)
    found: list[Found] = []
    nothing: PlanError | None = None
    try:
        found = search.run()
    except PlanError as error:
        nothing = error
    count = found[0].candidate.microbatches if found else asked.options().microbatches
    rivals = Rivals(spreads, cluster, asked, count).run()
    if nothing is not None and not rivals.best:
        raise nothing
    options = [_Option(one, _priced(search, one, exact=bool(rivals.best))) for one in found]
    options += [_Option(rival, rival.contender) for rival in rivals.best.values()]
    options.sort(key=lambda option: option.preference)
    refused = {**{str(shape): why for shape, why in search.refused.items()}, **rivals.refused}
    if judge is not None and len(graph.nodes) <= FEW_NODES:
        judging = _Judging(search, judge)
        beside = [one for one in rivals.made if one is not rivals.best[one.policy]]
        options = judging.order(options, [_Option(one, one.contender) for one in beside])
        refused |= judging.unbuilt
    refused = {name: why for name, why in refused.items() if name not in rivals.best}
    left_out = (rivals.left_out,) if rivals.left_out else ()
    return _explained(search, options, refused, left_out)


@dataclass(slots=True)
class _Judging:
    """Plans that are predicted to be close, told apart by a judge."""

    search: Search
    judge: Judge
    seconds: dict[Plan, float] = field(default_factory=dict)
    unbuilt: dict[str, str] = field(default_factory=dict)
    """Plans that cannot be built, and why."""

    def order(self, options: Sequence[_Option], more: Sequence[_Option]) -> list[_Option]:
        """The options, but first of all the fastest by the judge, which may be one of ``more``.

        Asked about are those of both that are close to what is predicted to be the fastest.
        """
        every = sorted([*options, *more], key=lambda option: option.preference)
        limit = CLOSE * every[0].contender.seconds
        close = [option for option in every if option.contender.seconds <= limit][:JUDGED]
        if not close[1:]:
            return list(options)
        judged = {id(option): self._judged(option) for option in close}
        first = min(judged.values(), key=lambda option: option.contender.simulated)
        others = (judged.get(id(option), option) for option in options)
        return [first, *(option for option in others if option is not first)]

    def _judged(self, option: _Option) -> _Option:
        """The option with what the judge says; what cannot be built takes for ever."""
        spreads, cluster = self.search.spreads, self.search.cluster
        made = msgspec.structs.replace(_plan_of(self.search, option.made), cluster=cluster)
        plan = msgspec.structs.replace(made, policy=AUTO, notes=())
        if plan not in self.seconds:
            try:
                self.seconds[plan] = self.judge(spreads.graph, plan, spreads.costs, cluster)
            except ShardwrightError as error:
                self.unbuilt[str(option.contender)] = f"it cannot be built: {error}"
                self.seconds[plan] = math.inf
        return replace(option, contender=replace(option.contender, simulated=self.seconds[plan]))


def _plan_of(search: Search, made: Found | Rival) -> Plan:
    return (
        made.plan if isinstance(made, Rival) else write_plan(search.spreads, search.cluster, made)
    )


def _priced(search: Search, found: Found, *, exact: bool) -> Contender:
    """What the search found takes; with an ``exact`` prediction where plans are close.

    What a step does once is priced in the search as of `SEVERAL` microbatches.
    """
    spreads, contender = search.spreads, Contender.of(found)
    if not (exact and found.spread.source.prepare and found.options.microbatches > SEVERAL):
        return contender
    plan = write_plan(spreads, search.cluster, found)
    again = predict(spreads.graph, plan, search.cluster, spreads.costs, spreads.sources)
    return Contender(contender.plan, again, contender.recompute)


def _explained(
    search: Search, options: Sequence[_Option], refused: Mapping[str, str], notes: Sequence[str]
) -> Plan:
    """The plan of the first option with its prediction, and with what it is compared with."""
    made, contender = options[0].made, options[0].contender
    chosen = msgspec.structs.replace(_plan_of(search, made), policy=AUTO)
    spread = made.found.spread if isinstance(made, Rival) else made.spread
    reasons = () if isinstance(made, Rival) else spread.reasons
    assigned = list(assignments(chosen, len(spread.source.view.nodes)))
    explanation = Explanation(
        plan=str(contender),
        rows=batch_rows(search.spreads.graph),
        others=alternatives(contender, [option.contender for option in options[1:]]),
        refused=tuple(f"{name}: {why}" for name, why in refused.items()),
        splits=split_reasons(spread.source, assigned, reasons),
        whole=done_whole(spread.source, assigned),
        simulated=contender.simulated if math.isfinite(contender.simulated) else 0.0,
    )
    return msgspec.structs.replace(
        chosen,
        notes=(*chosen.notes, *notes),
        prediction=contender.prediction,
        explanation=explanation,
    )


def write_plan(spreads: Spreads, cluster: Cluster, found: Found) -> Plan:
    """What was found as a plan of the graph."""
    apart, unfused = spreads.apart(found.candidate.shape)
    meshes = found.candidate.shape.ranks(cluster)
    devices = [device for mesh in meshes for device in mesh.devices]
    if spreads.training:
        made = _write_step(spreads, meshes, devices, found)
    else:
        assigned = _assigned(found, meshes)
        notes = whole_notes(apart, found.spread.splits)
        fingerprint = spreads.sources.fingerprint
        made = make_plan(apart, AUTO, devices, assigned, notes, fingerprint=fingerprint)
        made = msgspec.structs.replace(made, stages=tuple(found.stages.tolist()))
    idle = len(cluster.devices) - len(devices)
    said = (*made.notes, _idle_text(idle)) if idle else made.notes
    return msgspec.structs.replace(made, unfused=unfused, notes=said)


def _idle_text(count: int) -> str:
    return f"{count_text(count, 'slot')} {'has' if count == 1 else 'have'} nothing to do"


def _assigned(found: Found, meshes: Sequence[Mesh]) -> list[Assignment]:
    """The assignment of each node."""
    options, ranks = found.options, len(meshes)
    order = order_of(options.schedule, ranks, options.microbatches, options.chunks)
    placement = order.schedule.placement
    return [
        Assignment(meshes[placement[stage]], splits)
        for stage, splits in zip(found.stages.tolist(), found.spread.splits, strict=True)
    ]


def _write_step(
    spreads: Spreads, meshes: Sequence[Mesh], devices: Sequence[str], found: Found
) -> Plan:
    options, shape, sources = found.options, found.candidate.shape, spreads.sources
    _, unfused = spreads.apart(shape)
    step = sources.step(unfused, options.microbatches, shape.shards)
    forward = step.view
    assert len(forward.nodes) == len(found.stages), "the same nodes for any number of microbatches"
    work = measure_work(step, forward, options.microbatches)
    notes = [
        *whole_notes(forward, found.spread.splits),
        *sources.mixing_notes(unfused, options.microbatches, shape.shards),
    ]
    assigned, fingerprint = _assigned(found, meshes), sources.fingerprint
    made = make_plan(forward, AUTO, devices, assigned, notes, work=work, fingerprint=fingerprint)
    return msgspec.structs.replace(made, training=_training(found, meshes, work))


def _training(found: Found, meshes: Sequence[Mesh], work: Sequence[int]) -> TrainingPlan:
    options = found.options
    order = order_of(options.schedule, len(meshes), options.microbatches, options.chunks)
    return training_plan(options, order.schedule, meshes, found.stages.tolist(), work)
