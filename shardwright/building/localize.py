"""From a graph and a plan to one graph a device slot.

The nodes are written one after another on the slots of their meshes (`nodes`), and what they read
is brought there (`holdings`). A plan of stages that split nothing is the special case in which
every mesh is one slot. `step` does the same for a training step.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.building.ends import Ends
from shardwright.building.holdings import Holdings
from shardwright.building.nodes import LocalNode, NodeWriter
from shardwright.building.slots import BORDER, Localized, PhaseStage, SlotGraph
from shardwright.errors import PlanError
from shardwright.ir import IRGraph
from shardwright.ir.execute import describe_node
from shardwright.ir.inference import Inference
from shardwright.ir.repeats import repeated_blocks
from shardwright.planning.plan import Assignment, Plan, assignments, cluster_of
from shardwright.sharding import Layout


def localize(graph: IRGraph, plan: Plan) -> Localized:
    """The slots of a planned graph. Raises PlanError where the plan cannot be carried out."""
    holdings = empty_holdings(graph, plan)
    places = [PhaseStage()] * len(graph.nodes)
    write_forward(graph, plan, holdings, places)
    return finish(holdings, Ends(graph, holdings))


def empty_holdings(graph: IRGraph, plan: Plan) -> Holdings:
    """Slots that do nothing yet, and hold nothing."""
    inference = Inference()
    slots = {device: SlotGraph.empty(device, inference) for device in plan.devices}
    return Holdings(graph, slots, cluster_of(plan))


def write_forward(
    graph: IRGraph, plan: Plan, holdings: Holdings, places: Sequence[PhaseStage]
) -> dict[int, LocalNode]:
    """Write the nodes that the plan assigns, in their places, stage after stage.

    They are given by position, in the order in which they were written. Raises PlanError where a
    node reads what a later stage makes.
    """
    borders = layer_borders(graph)
    assigned = list(assignments(plan, len(places)))
    order = _stage_after_stage(graph, plan, places)
    arrivals = _arrivals(graph, assigned, order)
    writer = NodeWriter(graph, holdings.slots, holdings)
    written = {}
    for position in order:
        mesh = assigned[position].mesh
        for device in mesh.devices:
            holdings.slots[device].go(places[position])
            if position in borders:
                holdings.slots[device].add(BORDER)
        for value_id in arrivals.get(position, ()):
            holdings.fetch(value_id, mesh, Layout.replicated(mesh))
        written[position] = writer.add(graph.nodes[position], assigned[position])
    return written


def _stage_after_stage(graph: IRGraph, plan: Plan, places: Sequence[PhaseStage]) -> list[int]:
    """Positions of nodes by stage, those of one stage as they stand; what is prepared is first."""
    found = [-1 if place.stage is None else place.stage for place in places]
    stages = plan.stages or found
    made: dict[int, int] = {}
    for node, stage in zip(graph.nodes, stages, strict=False):
        if late := [value_id for value_id in node.inputs if made.get(value_id, stage) > stage]:
            raise PlanError(
                f"{describe_node(node)} is in stage {stage} of the plan and reads "
                f"{graph.values[late[0]].name!r} of stage {made[late[0]]}; number the stages so "
                "that nothing reads what a later one makes"
            )
        made |= dict.fromkeys(node.outputs, stage)
    return sorted(range(len(stages)), key=stages.__getitem__)


def finish(holdings: Holdings, ends: Ends) -> Localized:
    """What the slots do, complete."""
    outputs = ends.outputs()
    updates = ends.updates()
    for slot in holdings.slots.values():
        slot.note()
    return Localized(holdings.slots, holdings.communications, ends.inputs(), outputs, updates)


def layer_borders(graph: IRGraph) -> set[int]:
    """The positions at which one repeated layer meets the next."""
    return {cut for repeat in repeated_blocks(graph) for cut in repeat.cuts}


def _arrivals(
    graph: IRGraph, assigned: Sequence[Assignment], order: Sequence[int]
) -> dict[int, list[int]]:
    """What nodes read whole from other meshes, by the position at which their own stage begins.

    Brought there at once, it does not cut the stage in pieces where it is first read.
    """
    made: dict[int, int] = {}
    arrivals: dict[int, dict[int, None]] = {}
    start = 0
    for at, position in enumerate(order):
        node, assignment = graph.nodes[position], assigned[position]
        if at and assignment.mesh != assigned[order[at - 1]].mesh:
            start = at
        if not any(assignment.splits):
            arriving = (v for v in node.inputs if made.get(v, start) < start)
            arrivals.setdefault(order[start], {}).update(dict.fromkeys(arriving))
        made |= dict.fromkeys(node.outputs, at)
    return {position: list(values) for position, values in arrivals.items()}
