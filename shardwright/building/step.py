"""A planned training step as one graph a device slot: forward, backward and update.

The forward nodes are written on the slots as those of any graph are (`localize`), the backward
follows from what was written (`gradients`), and the update from the gradients (`update`). Each item
of a slot has its place: the phase and the stage in which it is done.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from shardwright.building.ends import Ends
from shardwright.building.gradients import Gradients
from shardwright.building.localize import empty_holdings, finish, layer_borders, write_forward
from shardwright.building.nodes import Written
from shardwright.building.slots import Localized, Place
from shardwright.building.update import Update
from shardwright.planning.plan import Plan
from shardwright.planning.step import Step


def localize_step(step: Step, plan: Plan, device_kind: str = "cpu") -> Localized:
    """The slots of a planned training step: forward, backward and update.

    Raises PlanError where the plan cannot be carried out, GraphError where an operator has no
    gradient.
    """
    assert plan.training is not None
    graph = step.graph
    holdings = empty_holdings(graph, plan)
    places = [
        Place("prepare") if position in step.prepare else Place("forward", stage)
        for position, stage in enumerate(plan.training.stages[: step.forward])
    ]
    written = write_forward(graph, plan, holdings, places)
    borders = layer_borders(graph)
    backward = next(node for node in graph.nodes if node.op == "Backward")
    gradients = Gradients(holdings, backward, plan.training.microbatches, device_kind)
    update = Update(step, plan, holdings, gradients, device_kind)
    ends = Ends(graph, holdings, plan.training.microbatches)
    ends.results()
    _backward(gradients, written, borders)
    for slot in holdings.slots.values():
        slot.go(Place("update"))
    for node in graph.nodes[step.forward :]:
        if node is not backward:
            update.add(node)
    localized = finish(holdings, ends)
    for device, slot in holdings.slots.items():
        slot.replace(gradients.replaced(device))
    return replace(localized, updates=[*localized.updates, *gradients.updates()])


def _backward(
    gradients: Gradients, written: Mapping[int, Written], borders: Collection[int]
) -> None:
    """Write the gradients of everything that the loss depends on, last node first."""
    gradients.begin(list(written.values()))
    for position, stands in reversed(list(written.items())):
        gradients.through(stands)
        if position in borders:
            gradients.border(stands)
