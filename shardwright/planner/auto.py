"""The automatic planner: from a graph and a cluster to the plan that is predicted to be fastest.

`search` gives the fastest candidates by prediction; of a small graph these are built and simulated,
and the fastest by simulation is the plan. With it come its prediction and what it was compared
with.

A training step is captured with the shapes of one microbatch, and a plan of n microbatches makes a
step of n of them: plans with different n are compared by what one microbatch's samples take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from shardwright.clusters import Cluster, Mesh
from shardwright.costs.cost import Analytic, Costs
from shardwright.errors import ShardwrightError
from shardwright.ir import IRGraph
from shardwright.ir.collection import without_collection
from shardwright.ir.quantities import count_text
from shardwright.planning.assemble import make_plan
from shardwright.planning.automatic.candidates import Asked, Found
from shardwright.planning.automatic.explain import alternatives, done_whole, split_reasons
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
from shardwright.planning.prediction.predict import estimate_plan
from shardwright.planning.prediction.spreading import spread_of_plan
from shardwright.planning.prediction.timing import order_of
from shardwright.planning.step import check_one_backward
from shardwright.planning.training import measure_work, training_plan

Simulate = Callable[[IRGraph, Plan, Costs, Cluster], float]
"""Seconds of a plan for each batch of the captured size."""

AUTO = "auto"
FEW_NODES = 200
"""Candidates of graphs of more nodes are not simulated: building them takes longer than the search.
A choice."""


@without_collection()
def auto_plan(
    graph: IRGraph,
    cluster: Cluster,
    costs: Costs | None = None,
    asked: Asked | None = None,
    simulate: Simulate | None = None,
) -> Plan:
    """The fastest plan for a graph on a cluster: by ``simulate`` where given, else by prediction.

    Raises PlanError where no plan fits, with what is missing in the nearest.
    """
    asked = asked or Asked()
    asked.check()
    spreads = Spreads(graph, cluster, costs or Analytic(cluster.device))
    if spreads.training:
        check_one_backward(graph)
    search = Search(spreads, cluster, asked)
    found = [_repriced(search, one) for one in search.run()]
    found.sort(key=lambda one: one.seconds)
    refused = [f"{shape}: {why}" for shape, why in search.refused.items()]
    if simulate is not None and len(graph.nodes) <= FEW_NODES and found[1:]:
        found = [_simulated(search, one, simulate, refused) for one in found]
        found.sort(key=lambda one: one.simulated)
    return _explained(search, found, refused)


def _simulated(search: Search, found: Found, simulate: Simulate, refused: list[str]) -> Found:
    """The candidate with its simulated time; infinite, and noted, where it cannot be built."""
    spreads, cluster = search.spreads, search.cluster
    plan = msgspec.structs.replace(
        write_plan(spreads, cluster, found), cluster=cluster, policy=AUTO, notes=()
    )
    try:
        seconds = simulate(spreads.graph, plan, spreads.costs, cluster)
    except ShardwrightError as error:
        refused.append(f"{found}: it cannot be built: {error}")
        seconds = math.inf
    return replace(found, simulated=seconds)


def _explained(search: Search, found: Sequence[Found], refused: Sequence[str]) -> Plan:
    """The plan of the first candidate with its prediction, and with what it is compared with."""
    best, spread = found[0], found[0].spread
    chosen = msgspec.structs.replace(write_plan(search.spreads, search.cluster, best), policy=AUTO)
    assigned = list(assignments(chosen, len(spread.source.view.nodes)))
    explanation = Explanation(
        plan=str(best),
        rows=batch_rows(search.spreads.graph),
        others=alternatives(best, found[1:]),
        refused=tuple(refused),
        splits=split_reasons(spread.source, assigned, spread.reasons),
        whole=done_whole(spread.source, assigned),
        simulated=best.simulated if math.isfinite(best.simulated) else 0.0,
    )
    return msgspec.structs.replace(chosen, prediction=best.prediction, explanation=explanation)


def _repriced(search: Search, found: Found) -> Found:
    """The candidate as `predict` has it.

    The search prices what a step does once as of `SEVERAL` microbatches.
    """
    if not found.spread.source.prepare or found.options.microbatches <= SEVERAL:
        return found
    spreads, cluster = search.spreads, search.cluster
    plan = write_plan(spreads, cluster, found)
    exact = spread_of_plan(spreads.graph, plan, cluster, spreads.costs, spreads.sources)
    return replace(found, estimate=estimate_plan(exact, cluster))


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
