"""What nodes cost, in seconds and bytes: estimated from shapes, or measured."""

from shardwright.profiling.cost import Analytic, Costs, NodeCost
from shardwright.profiling.layer import Layer
from shardwright.profiling.profile import Profile
from shardwright.profiling.profiler import profile, profile_network
from shardwright.profiling.tasks import TaskTime, TaskTimes

__all__ = [
    "Analytic",
    "Costs",
    "Layer",
    "NodeCost",
    "Profile",
    "TaskTime",
    "TaskTimes",
    "profile",
    "profile_network",
]
