"""Pictures of planned and profiled graphs.

Comes in: a graph, a plan or a partition of it, and what nodes cost. Goes out: a `Drawing` of the
graph as it is cut: where a plan takes fused products apart or lets stages do nodes again, those are
drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardwright.costs import Costs, Profile
from shardwright.errors import DrawError
from shardwright.ir import IRGraph
from shardwright.ir.drawing.drawing import Drawing, draw_graph
from shardwright.ir.drawing.parts import HasStages, Parts
from shardwright.ir.quantities import MILLISECOND
from shardwright.ir.steps import forward_nodes, is_step
from shardwright.planning import Plan
from shardwright.planning.assemble import planned, step_of
from shardwright.planning.partitions.layers import LayerGraph
from shardwright.planning.plan import assignments, check_belongs


def draw(
    graph: IRGraph | LayerGraph,
    path: str | Path | None = None,
    *,
    plan: Plan | None = None,
    partition: Parts | HasStages | Mapping[int, int] | None = None,
    profile: Profile | Costs | None = None,
    fold: bool = True,
    depth: int | None = None,
    caption: str = "",
) -> Drawing:
    """Draw a graph, coloured by a plan's stages or by a partition, sized by a profile's times.

    Times are those of the forward, of a training step those of forward and backward; where a
    profile lacks a node they are estimated. ``caption`` is a line below the graph's name; the
    other arguments are as those of `IRGraph.draw`. A `LayerGraph` is drawn as its graph, with its
    partition where it has one. Raises PlanError where the plan is of another graph, and DrawError.
    """
    if isinstance(graph, LayerGraph):
        if plan is None and partition is None:
            partition = graph.partition
        graph = graph.graph
    if not isinstance(graph, IRGraph):
        raise DrawError(
            "a plan is drawn with the graph it is of: sw.draw(graph, plan=plan)"
            if isinstance(graph, Plan)
            else f"graph is a {type(graph).__name__}; give what capture, compile_ir or build_graph "
            "returns"
        )
    if plan is not None and partition is not None:
        raise DrawError("give either a plan or a partition, which both say how nodes are coloured")
    shown = graph
    if plan is not None:
        shown, partition = _cut(graph, plan)
    times = None if profile is None else node_times(shown, profile)
    return draw_graph(
        shown, path, partition=partition, times=times, fold=fold, depth=depth, caption=caption
    )


def node_times(graph: IRGraph, profile: Profile | Costs) -> dict[int, float]:
    """Milliseconds of each forward node; of a training step with those of its backward."""
    costs = profile.costs() if isinstance(profile, Profile) else profile
    step = is_step(graph)
    found = {}
    for node in forward_nodes(graph):
        cost = costs.node(graph, node)
        found[node.id] = (cost.total if step else cost.forward) / MILLISECOND
    return found


def _cut(graph: IRGraph, plan: Plan) -> tuple[IRGraph, Parts]:
    """The graph whose nodes a plan assigns, and the part of each. Raises PlanError."""
    check_belongs(plan, graph)
    if plan.training is not None:
        step = step_of(graph, plan)
        nodes = step.graph.nodes[: step.forward]
        return step.graph, _staged(plan, [node.id for node in nodes], plan.training.stages)
    whole = planned(graph, plan)
    ids = [node.id for node in whole.nodes]
    return whole, _staged(plan, ids, plan.stages) if plan.stages else _by_slots(plan, ids)


def _staged(plan: Plan, node_ids: list[int], stages: tuple[int, ...]) -> Parts:
    """A part a stage, called after its slots: ``stage 1 on d1``."""
    slots: dict[int, dict[str, None]] = {}
    for stage, assignment in zip(stages, assignments(plan, len(node_ids)), strict=True):
        slots.setdefault(stage, {}).update(dict.fromkeys(assignment.mesh.devices))
    names = {stage: f"stage {stage} on {' '.join(found)}" for stage, found in slots.items()}
    return Parts(dict(zip(node_ids, stages, strict=True)), names)


def _by_slots(plan: Plan, node_ids: list[int]) -> Parts:
    """A part for each set of slots that nodes run on, in the order of the first node of each."""
    numbers: dict[tuple[str, ...], int] = {}
    parts = {
        node_id: numbers.setdefault(assignment.mesh.devices, len(numbers))
        for node_id, assignment in zip(node_ids, assignments(plan, len(node_ids)), strict=True)
    }
    apart = sum(map(len, numbers)) == len({slot for slots in numbers for slot in slots})
    names = {
        number: f"{f'stage {number} on ' if apart and len(numbers) > 1 else ''}{' '.join(slots)}"
        for slots, number in numbers.items()
    }
    return Parts(parts, names)
