"""Who decides between plans that are predicted to take about as long.

A prediction sums up stages; what a built file takes, task by task, differs from it by some percent.
A judge builds a plan, and simulates what it built. Building is the business of `transform`, which
stands behind planning, so the package itself appoints the judge, by name: that imports nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwright.ir import IRGraph
    from shardwright.layout import Cluster
    from shardwright.planning.plan import Plan
    from shardwright.profiling.cost import Costs

    Judge = Callable[[IRGraph, Plan, Costs, Cluster], float]
    """Seconds of a plan for each batch of the captured size."""

_appointed: list[tuple[str, str]] = []


def appoint(module: str, name: str) -> None:
    """Let a function of a module be the judge from now on; it is imported when it is needed."""
    _appointed[:] = [(module, name)]


def appointed() -> Judge | None:
    """The judge; None where there is none."""
    for module, name in _appointed:
        found: Judge = getattr(import_module(module), name)
        return found
    return None
