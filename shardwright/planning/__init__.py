"""Plans: which device slots run which node, and how it is split over them."""

from typing import TYPE_CHECKING

from shardwright.lazy import import_lazily

if TYPE_CHECKING:
    from shardwright.costs.predict import Prediction
    from shardwright.planning.explain import Difference, difference
    from shardwright.planning.like import plan_beside
    from shardwright.planning.partition import Partition
    from shardwright.planning.partitioners import (
        METIS_partition,
        metis_partition,
        partition_by_memory,
        pipedream_partition,
    )
    from shardwright.planning.plan import Assignment, Plan, SlotLoad, Split, Terms, TrainingPlan
    from shardwright.planning.policy import Policy, PolicyGraph, Resource
    from shardwright.planning.predict import predict
    from shardwright.planning.step import PreparedStep, as_step

__all__ = [
    "Assignment",
    "Difference",
    "METIS_partition",
    "Partition",
    "Plan",
    "Policy",
    "PolicyGraph",
    "Prediction",
    "PreparedStep",
    "Resource",
    "SlotLoad",
    "Split",
    "Terms",
    "TrainingPlan",
    "as_step",
    "difference",
    "metis_partition",
    "partition_by_memory",
    "pipedream_partition",
    "plan_beside",
    "predict",
]

import_lazily(__name__)
