"""What nodes cost, in seconds and bytes: estimated from shapes, or measured."""

from typing import TYPE_CHECKING

from shardwright.lazy import import_lazily

if TYPE_CHECKING:
    from shardwright.profiling.cost import Analytic, Costs, NodeCost
    from shardwright.profiling.fit import Measurement, fit
    from shardwright.profiling.layer import Layer
    from shardwright.profiling.links import profile_links
    from shardwright.profiling.machine import profile_cluster, profile_device
    from shardwright.profiling.profile import Profile
    from shardwright.profiling.profiler import profile, profile_network
    from shardwright.profiling.tasks import TaskTime, TaskTimes

__all__ = [
    "Analytic",
    "Costs",
    "Layer",
    "Measurement",
    "NodeCost",
    "Profile",
    "TaskTime",
    "TaskTimes",
    "fit",
    "profile",
    "profile_cluster",
    "profile_device",
    "profile_links",
    "profile_network",
]

import_lazily(__name__)
