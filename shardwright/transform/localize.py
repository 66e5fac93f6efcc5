"""From a graph and a plan to one graph a device slot.

The nodes are written one after another on the slots of their meshes (`nodes`), and what they read
is brought there (`holdings`). A plan of stages that split nothing is the special case in which
every mesh is one slot. `step` does the same for a training step.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.ir import IRGraph, IRNode
from shardwright.ir.inference import Inference
from shardwright.ir.repeats import repeated_blocks
from shardwright.layout import Cluster, Layout
from shardwright.planning.plan import Assignment, Plan, assignments
from shardwright.transform.ends import Ends
from shardwright.transform.holdings import Holdings
from shardwright.transform.nodes import NodeWriter, Written
from shardwright.transform.slots import BORDER, Localized, Place, SlotGraph


def localize(graph: IRGraph, plan: Plan) -> Localized:
    """The slots of a planned graph. Raises PlanError where the plan cannot be carried out."""
    holdings = empty_holdings(graph, plan)
    places = [Place()] * len(graph.nodes)
    write_forward(graph, plan, holdings, places)
    return finish(holdings, Ends(graph, holdings))


def empty_holdings(graph: IRGraph, plan: Plan) -> Holdings:
    """Slots that do nothing yet, and hold nothing."""
    inference = Inference()
    slots = {device: SlotGraph.empty(device, inference) for device in plan.devices}
    return Holdings(graph, slots, Cluster((tuple(plan.devices),)))


def write_forward(
    graph: IRGraph, plan: Plan, holdings: Holdings, places: Sequence[Place]
) -> list[Written]:
    """Write the nodes that the plan assigns, in their places."""
    nodes = graph.nodes[: len(places)]
    borders = layer_borders(graph)
    assigned = list(assignments(plan, len(nodes)))
    arrivals = _arrivals(nodes, assigned)
    writer = NodeWriter(graph, holdings.slots, holdings)
    written = []
    for position, (node, assignment) in enumerate(zip(nodes, assigned, strict=True)):
        mesh = assignment.mesh
        for device in mesh.devices:
            holdings.slots[device].go(places[position])
            if position in borders:
                holdings.slots[device].add(BORDER)
        for value_id in arrivals.get(position, ()):
            holdings.fetch(value_id, mesh, Layout.replicated(mesh))
        written.append(writer.add(node, assignment))
    return written


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


def _arrivals(nodes: Sequence[IRNode], assigned: Sequence[Assignment]) -> dict[int, list[int]]:
    """What nodes read whole from other meshes, by the position at which their own stage begins.

    Brought there at once, it does not cut the stage in pieces where it is first read.
    """
    made: dict[int, int] = {}
    arrivals: dict[int, dict[int, None]] = {}
    start = 0
    for position, (node, assignment) in enumerate(zip(nodes, assigned, strict=True)):
        if position and assignment.mesh != assigned[position - 1].mesh:
            start = position
        if not any(assignment.splits):
            arriving = (v for v in node.inputs if made.get(v, start) < start)
            arrivals.setdefault(start, {}).update(dict.fromkeys(arriving))
        made |= dict.fromkeys(node.outputs, position)
    return {position: list(values) for position, values in arrivals.items()}
