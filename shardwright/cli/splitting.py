"""The options that say how a graph is split: ``--devices``, ``--policy`` and ``--mesh``."""

from __future__ import annotations

from shardwright.cli.userfiles import UserFiles
from shardwright.errors import PlanError
from shardwright.ir import IRGraph
from shardwright.planning import Plan, plan

DEVICES = 2
"""Slots, where no option says how many."""
POLICY = "pipeline"


def plan_as_told(
    graph: IRGraph, files: UserFiles, devices: int | None, policy: str | None, mesh: str | None
) -> Plan:
    """The plan that the options ask for; None is an option that was not given.

    ``policy`` is a name or ``FILE.py:function``; ``mesh`` is ``pipeline=2,tensor=2``.
    Raises PlanError.
    """
    if mesh is not None:
        if policy is not None:
            raise PlanError("give either --policy or --mesh, whose axes are policies")
        return plan(graph, devices, mesh=parse_mesh(mesh))
    count = DEVICES if devices is None else devices
    chosen = policy or POLICY
    return plan(graph, count, files.policy(chosen) if ":" in chosen else chosen)


def parse_mesh(text: str) -> dict[str, int]:
    """Sizes by axis of ``pipeline=2,tensor=2``. Raises PlanError."""
    sizes: dict[str, int] = {}
    for entry in text.split(","):
        axis, _, size = entry.strip().partition("=")
        if not (axis and size.isdecimal()) or axis in sizes:
            raise PlanError(
                f"the mesh {text!r} is wrong at {entry.strip()!r}; expected axes and sizes, each "
                "axis once: pipeline=2,tensor=2"
            )
        sizes[axis] = int(size)
    return sizes
