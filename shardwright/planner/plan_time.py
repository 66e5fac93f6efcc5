"""The simulated time of a plan, by which `planning.automatic` ranks its candidates."""

from __future__ import annotations

from shardwright.building.build import without_weights
from shardwright.clusters import Cluster
from shardwright.costs.cost import Costs
from shardwright.ir import IRGraph
from shardwright.planning.plan import Plan
from shardwright.simulation.simulate import simulate

CALLS = 16
"""So many calls of a model follow one another: how long one takes alone says little."""


def simulated_seconds(graph: IRGraph, plan: Plan, costs: Costs, cluster: Cluster) -> float:
    """Seconds of the built plan for each batch of the captured size."""
    pipeline = without_weights(graph, plan)
    if plan.training is None:
        return simulate(pipeline, costs, cluster, calls=CALLS).step_time
    return simulate(pipeline, costs, cluster).step_time / plan.training.microbatches
