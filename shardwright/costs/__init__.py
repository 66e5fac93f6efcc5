"""What calls, units and tasks cost, in seconds and bytes: estimated from shapes, or measured."""

from typing import TYPE_CHECKING

from shardwright.lazy import import_lazily

if TYPE_CHECKING:
    from shardwright.costs.cost import Analytic, Costs, NodeCost
    from shardwright.costs.fit import FitPoint, fit
    from shardwright.costs.profile import Layer, Profile
    from shardwright.costs.tasks import TaskTime, TaskTimes

__all__ = [
    "Analytic",
    "Costs",
    "FitPoint",
    "Layer",
    "NodeCost",
    "Profile",
    "TaskTime",
    "TaskTimes",
    "fit",
]

import_lazily(__name__)
