"""The automatic planner: from a graph and a cluster to the plan that is predicted to be fastest.

`search` gives the fastest candidates by prediction; of a small graph these are built and simulated,
and the fastest by simulation is the plan. With it come its prediction and what it was compared
with.

A training step is captured with the shapes of one microbatch, and a plan of n microbatches makes a
step of n of them: plans with different n are compared by what one microbatch's samples take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import msgspec

from shardwright.clusters import Cluster, Mesh
from shardwright.costs.cost import Analytic, Costs
from shardwright.errors import ShardwrightError
from shardwright.ir import IRGraph
from shardwright.ir.graph import without_collection
from shardwright.ir.tensor_meta import count_text
from shardwright.ops.bound import Flow
from shardwright.planning.assemble import make_plan
from shardwright.planning.automatic.candidates import Asked, Found
from shardwright.planning.automatic.search import PlanSearch
from shardwright.planning.automatic.spreads import SEVERAL, Spreads
from shardwright.planning.mesh_plan import training_plan
from shardwright.planning.pipeline import measure_work
from shardwright.planning.plan import (
    Alternative,
    Assignment,
    Explanation,
    Plan,
    Split,
    SplitReason,
    Terms,
    TrainingPlan,
    assignments,
)
from shardwright.planning.prediction.predict import estimate_plan
from shardwright.planning.prediction.source import Forward
from shardwright.planning.prediction.spreading import spread_of_plan
from shardwright.planning.prediction.timing import order_of
from shardwright.planning.rules import batch_rows, whole_notes
from shardwright.planning.step import check_one_backward

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
    search = PlanSearch(spreads, cluster, asked)
    found = [_repriced(search, one) for one in search.run()]
    found.sort(key=lambda one: one.seconds)
    refused = [f"{shape}: {why}" for shape, why in search.refused.items()]
    if simulate is not None and len(graph.nodes) <= FEW_NODES and found[1:]:
        found = [_simulated(search, one, simulate, refused) for one in found]
        found.sort(key=lambda one: one.simulated)
    return _explained(search, found, refused)


def _simulated(search: PlanSearch, found: Found, simulate: Simulate, refused: list[str]) -> Found:
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


def _explained(search: PlanSearch, found: Sequence[Found], refused: Sequence[str]) -> Plan:
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


def _repriced(search: PlanSearch, found: Found) -> Found:
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


# --- explanation ----------------------------------------------------------------------------------


def alternatives(best: Found, others: Sequence[Found]) -> tuple[Alternative, ...]:
    """What else was looked at, the fastest first, and why it is not chosen."""
    return tuple(
        Alternative(str(other), other.seconds, other.peak, _why(best, other))
        for other in sorted(others, key=lambda other: other.seconds)
    )


def _why(best: Found, other: Found) -> str:
    """What another plan takes longer for, on its slowest slot and for a captured batch."""
    if other.options.recompute != "none" and best.options.recompute == "none":
        return "it must compute activations again to fit"
    if math.isinf(other.simulated):
        return "it cannot be built"
    if best.simulated < other.simulated and other.seconds <= best.seconds:
        return (
            f"built and simulated it takes {1e3 * other.simulated:.3f} ms, the chosen one "
            f"{1e3 * best.simulated:.3f} ms"
        )
    work = other.work - best.work
    waits = (other.seconds - other.work) - (best.seconds - best.work)
    if max(work, waits) <= 0:
        return "as fast"
    if work >= waits:
        return (
            f"its slowest slot is at work {1e3 * work:.3f} ms longer, communication inside the "
            "mesh and what is done once a step included"
        )
    return f"its slots wait {1e3 * waits:.3f} ms longer for one another"


def split_reasons(
    source: Forward, assigned: Sequence[Assignment], reasons: Sequence[str]
) -> tuple[SplitReason, ...]:
    """Equal nodes that are split alike, in the order of the first of each.

    ``reasons`` are those of nodes where they are known.
    """
    groups: dict[tuple[str, str, str], list[int]] = {}
    for i, found in _shared(assigned):
        said = reasons[i] if i < len(reasons) else ""
        key = source.view.nodes[i].op, _text(found), said or _reason(source, i, found)
        groups.setdefault(key, []).append(i)
    return tuple(
        SplitReason(len(at), op, source.view.nodes[at[0]].scope, split, reason)
        for (op, split, reason), at in groups.items()
    )


def _shared(assigned: Sequence[Assignment]) -> Iterator[tuple[int, Assignment]]:
    """The nodes that several slots share, by position."""
    return ((i, found) for i, found in enumerate(assigned) if found.mesh.devices[1:])


def _axes(found: Assignment) -> Iterator[tuple[str, Split | Terms | None]]:
    return zip(found.mesh.axes, found.splits, strict=True)


def _text(found: Assignment) -> str:
    """What each axis does with a node: ``data: b, tensor: n by 64``."""
    words = []
    for axis, split in _axes(found):
        if isinstance(split, Split):
            unit = f" by {split.unit}" if split.unit > 1 else ""
            words.append(f"{axis}: {split.identifier}{unit}")
        else:
            words.append(f"{axis}: {'terms of a sum' if isinstance(split, Terms) else 'whole'}")
    return ", ".join(words)


def _reason(source: Forward, position: int, found: Assignment) -> str:
    """Why a node is split so by policies that follow one rule for each axis."""
    bound = source.bound(position)
    if bound is None:
        return "no annotation"
    reasons = []
    for axis, split in _axes(found):
        if axis == "data":
            reasons.append("it has the batch" if split else "it has no batch")
        elif isinstance(split, Split):
            reasons.append(_of_tensors(source, position, bound.flow(split.identifier)))
        elif isinstance(split, Terms):
            reasons.append("it is linear: the sum is done behind it")
        else:
            reasons.append("nothing that it reads comes split, and it has no matrix to split")
    return "; ".join(dict.fromkeys(reasons))


def _of_tensors(source: Forward, position: int, flow: Flow) -> str:
    """Why an inner axis splits a node."""
    values = source.view.values
    inputs = source.view.nodes[position].inputs
    cut = [
        values[v].is_stored
        for v, carry in zip(inputs, flow.inputs, strict=True)
        if carry.kind == "shard"
    ]
    if any(carry.kind == "partial" for carry in flow.outputs):
        return "what it sums over comes split: partial sums, put together behind it"
    if cut and all(cut):
        return "columns of its stored matrix, which nothing else has"
    return "what it reads comes split so"


def done_whole(source: Forward, assigned: Sequence[Assignment]) -> tuple[str, ...]:
    """Operators that every slot of a stage does in full, for want of an annotation."""
    nodes = source.view.nodes
    return tuple(sorted({nodes[i].op for i, _ in _shared(assigned) if source.bound(i) is None}))
