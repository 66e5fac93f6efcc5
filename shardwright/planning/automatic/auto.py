"""The automatic planner: from a graph and a cluster to the plan that is predicted to be fastest.

Comes in: a model or training step, a `Cluster`, what nodes cost, and what is already decided. Goes
out: a `Plan` with its prediction and with what else was looked at. It is found by `search`; here it
is written down.

A training step is captured with the shapes of one microbatch, and a plan of n microbatches makes a
step of n of them: plans with different n are compared by what one microbatch's samples take.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from shardwright.ir import IRGraph
from shardwright.layout import Cluster, Mesh
from shardwright.planning.assemble import make_plan
from shardwright.planning.automatic.candidates import Asked, Found
from shardwright.planning.automatic.explain import explain
from shardwright.planning.automatic.search import Search
from shardwright.planning.automatic.spreads import Spreads
from shardwright.planning.forward import forward_view
from shardwright.planning.mesh import whole_notes
from shardwright.planning.mixing import mixing_notes
from shardwright.planning.plan import Assignment, Plan, TrainingPlan, fingerprint_graph
from shardwright.planning.prediction.timing import order_of
from shardwright.planning.step import as_step, check_one_backward
from shardwright.planning.training import measure_training, training_plan
from shardwright.profiling.cost import Analytic, Costs

AUTO = "auto"


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
    found = search.run()
    return msgspec.structs.replace(
        write_plan(spreads, cluster, found[0]),
        prediction=found[0].estimate.prediction(),
        explanation=explain(search, found),
    )


def write_plan(spreads: Spreads, cluster: Cluster, found: Found) -> Plan:
    """What was found as a plan of the graph."""
    apart, unfused = spreads.apart(found.candidate.shape)
    meshes = found.candidate.shape.ranks(cluster)
    devices = [device for mesh in meshes for device in mesh.devices]
    if spreads.training:
        made = _write_step(apart, meshes, devices, found)
    else:
        assigned = _assigned(found, meshes)
        notes = whole_notes(apart, found.spread.splits)
        made = make_plan(apart, AUTO, devices, assigned, notes)
        made = msgspec.structs.replace(made, stages=tuple(found.stages.tolist()))
    idle = len(cluster.devices) - len(devices)
    said = (*made.notes, f"{idle} slots have nothing to do") if idle else made.notes
    return msgspec.structs.replace(
        made, fingerprint=fingerprint_graph(spreads.graph), unfused=unfused, notes=said
    )


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
    apart: IRGraph, meshes: Sequence[Mesh], devices: Sequence[str], found: Found
) -> Plan:
    options, shards = found.options, found.candidate.shape.shards
    step = as_step(apart, options.microbatches, shards)
    forward = forward_view(step.graph)
    assert len(forward.nodes) == len(found.stages), "the same nodes for any number of microbatches"
    totals = measure_training(step, forward, options.microbatches).work
    work = [after - before for before, after in pairwise(totals)]
    notes = [
        *step.notes,
        *whole_notes(forward, found.spread.splits),
        *mixing_notes(forward_view(apart), options.microbatches, shards),
    ]
    made = make_plan(forward, AUTO, devices, _assigned(found, meshes), notes, work=work)
    return msgspec.structs.replace(made, training=_training(found, meshes, work))


def _training(found: Found, meshes: Sequence[Mesh], work: Sequence[int]) -> TrainingPlan:
    options = found.options
    order = order_of(options.schedule, len(meshes), options.microbatches, options.chunks)
    return training_plan(options, order.schedule, meshes, found.stages.tolist(), work)
