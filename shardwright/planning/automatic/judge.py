"""Who decides between plans that are predicted to take about as long.

A prediction sums up stages; what a built file takes, task by task, differs from it by some percent.
A judge builds a plan, and simulates what it built. Building is the business of `transform`, which
stands behind planning, which supplies the judge (`lazy.SUPPLIED`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shardwright.lazy import supplied

if TYPE_CHECKING:
    from shardwright.ir import IRGraph
    from shardwright.layout import Cluster
    from shardwright.planning.plan import Plan
    from shardwright.profiling.cost import Costs

    Judge = Callable[[IRGraph, Plan, Costs, Cluster], float]
    """Seconds of a plan for each batch of the captured size."""


def judge() -> Judge:
    """The judge."""
    found: Judge = supplied("judge")
    return found
