"""The automatic planner: from a graph and a cluster to the plan that is predicted to be fastest.

Comes in: a model or training step, a `Cluster`, what nodes cost, and what is already decided. Goes
out: a `Plan` with its prediction and with what else was looked at: the fastest of what `search`
finds, which is written down here, and of what partitioners make (`rivals`). So none of these plans
is predicted to be faster.

A training step is captured with the shapes of one microbatch, and a plan of n microbatches makes a
step of n of them: plans with different n are compared by what one microbatch's samples take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from shardwright.errors import PlanError
from shardwright.ir import IRGraph
from shardwright.ir.collection import without_collection
from shardwright.layout import Cluster, Mesh
from shardwright.planning.assemble import make_plan
from shardwright.planning.automatic.candidates import Asked, Found
from shardwright.planning.automatic.contender import Contender
from shardwright.planning.automatic.explain import alternatives, done_whole, split_reasons
from shardwright.planning.automatic.rivals import Rival, Rivals
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
from shardwright.planning.prediction.source import Forward
from shardwright.planning.prediction.timing import order_of
from shardwright.planning.step import check_one_backward
from shardwright.planning.training import measure_work, training_plan
from shardwright.profiling.cost import Analytic, Costs

AUTO = "auto"
FASTER = 1 - 1e-9
"""A partitioner's plan is taken where it takes less than this times what the search found."""


@dataclass(frozen=True, slots=True)
class _Chosen:
    """A plan, what it is compared by, and what it is explained from."""

    plan: Plan
    contender: Contender
    source: Forward
    reasons: Sequence[str] = ()


@without_collection()
def auto_plan(
    graph: IRGraph, cluster: Cluster, costs: Costs | None = None, asked: Asked | None = None
) -> Plan:
    """The plan for a graph that is predicted to be fastest on a cluster.

    Raises PlanError where no plan fits, with what lacks in the nearest.
    """
    asked = asked or Asked()
    asked.check()
    spreads = Spreads(graph, cluster, costs or Analytic(cluster.device))
    if spreads.training:
        check_one_backward(graph)
    search = Search(spreads, cluster, asked)
    try:
        found = search.run()
    except PlanError:
        rivals = Rivals(spreads, cluster, asked, asked.options().microbatches).run()
        fastest = rivals.fastest()
        if fastest is None:
            raise
        return _explained(search, _of_rival(fastest), [], rivals)
    rivals = Rivals(spreads, cluster, asked, found[0].candidate.microbatches).run()
    priced = {id(one): _priced(search, one, exact=bool(rivals.best)) for one in found}
    found.sort(key=lambda one: priced[id(one)].seconds)
    contender, *others = (priced[id(one)] for one in found)
    fastest = rivals.fastest()
    if fastest is not None and fastest.contender.seconds < FASTER * contender.seconds:
        return _explained(search, _of_rival(fastest), [contender, *others], rivals)
    plan, spread = write_plan(spreads, cluster, found[0]), found[0].spread
    chosen = _Chosen(plan, contender, spread.source, spread.reasons)
    return _explained(search, chosen, others, rivals)


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


def _of_rival(rival: Rival) -> _Chosen:
    plan = msgspec.structs.replace(rival.plan, policy=AUTO)
    return _Chosen(plan, rival.contender, rival.found.spread.source)


def _explained(
    search: Search, chosen: _Chosen, others: Sequence[Contender], rivals: Rivals
) -> Plan:
    """The plan with its prediction, and with what it is compared with."""
    made = [rival.contender for rival in rivals.best.values()]
    assigned = list(assignments(chosen.plan, len(chosen.source.view.nodes)))
    refused = {**{str(shape): why for shape, why in search.refused.items()}, **rivals.refused}
    explanation = Explanation(
        plan=str(chosen.contender),
        rows=batch_rows(search.spreads.graph),
        others=alternatives(
            chosen.contender, [*others, *(one for one in made if one != chosen.contender)]
        ),
        refused=tuple(f"{name}: {why}" for name, why in refused.items() if name not in rivals.best),
        splits=split_reasons(chosen.source, assigned, chosen.reasons),
        whole=done_whole(chosen.source, assigned),
    )
    left_out = (rivals.left_out,) if rivals.left_out else ()
    return msgspec.structs.replace(
        chosen.plan,
        notes=(*chosen.plan.notes, *left_out),
        prediction=chosen.contender.prediction,
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
    said = (*made.notes, f"{idle} slots have nothing to do") if idle else made.notes
    return msgspec.structs.replace(made, unfused=unfused, notes=said)


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
        *step.notes,
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
