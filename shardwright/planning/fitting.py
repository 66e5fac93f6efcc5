"""Whether a plan fits in the memory of the machines that it was asked for.

Comes in: a plan, the graph that it is for, and a cluster. What always holds: of every slot of a
plan that passes no more bytes are predicted than the cluster's device has.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.clusters import Cluster
from shardwright.costs.cost import Costs
from shardwright.errors import PlanError
from shardwright.ir import IRGraph
from shardwright.planning.plan import Plan
from shardwright.planning.predicted import SlotMemory
from shardwright.planning.prediction.predict import predict


def check_fits(graph: IRGraph, plan: Plan, cluster: Cluster, costs: Costs | None) -> None:
    """Raise PlanError where a slot would hold more than it has room for, with what lacks."""
    fullest = max(predict(graph, plan, cluster, costs).slots, key=lambda slot: slot.memory.total)
    held, room = fullest.memory.total, cluster.device.memory
    if held > room:
        raise PlanError(
            f"the plan for {graph.name!r} by {plan.policy} does not fit: slot {fullest.device!r} "
            f"would hold {fullest.memory}, {held - room} bytes more than its {room}; it would fit "
            f"in slots of {held} bytes; {', '.join(_remedies(plan, fullest.memory))}, or let "
            "policy='auto' look for a plan that fits"
        )


def _remedies(plan: Plan, held: SlotMemory) -> Iterator[str]:
    """What leaves a slot less to hold, or more room."""
    yield "give those, or more slots"
    if plan.training is not None and held.activations > held.total // 4:
        yield "take smaller microbatches"
        if plan.training.recompute == "none":
            yield "give recompute='full'"
