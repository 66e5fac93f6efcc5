"""What a plan is for and how its work is ordered, in words: a line for each setting.

Comes in: a plan. Goes out: short texts by name, which `difference` sets side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby

from shardwright.clusters.cluster_file import device_text, links_text
from shardwright.planning.plan import Plan


def _of_training(name: str) -> Callable[[Plan], str]:
    def text(plan: Plan) -> str:
        found = getattr(plan.training, name, None)
        return "none" if found is None else str(found)

    return text


def _bubble(plan: Plan) -> str:
    return "none" if plan.training is None else f"{100 * plan.training.bubble():.1f}%"


def _grids(plan: Plan) -> str:
    grids = {
        " × ".join(f"{axis} {size}" for axis, size in zip(mesh.axes, mesh.sizes, strict=True))
        for mesh in (assignment.mesh for assignment in plan.assignments)
    }
    return " and ".join(sorted(grid or "one slot" for grid in grids))


def _machines(plan: Plan) -> str:
    if plan.cluster is None:
        return "unknown"
    several = len(plan.cluster.hosts) > 1
    between = f", {links_text(plan.cluster.between)} between" if several else ""
    inside = links_text(plan.cluster.inside)
    return f"{_hosts(plan)}, {device_text(plan.cluster.device)}, {inside} inside{between}"


def _hosts(plan: Plan) -> str:
    """How many hosts, and how many slots each has: ``4 hosts (3 × 8 + 2 slots)``."""
    assert plan.cluster is not None
    hosts = plan.cluster.hosts
    if len(hosts) == 1:
        return "1 host"
    runs = [(size, len(list(run))) for size, run in groupby(map(len, hosts))]
    sizes = " + ".join(f"{count} × {size}" if count > 1 else str(size) for size, count in runs)
    return f"{len(hosts)} hosts ({sizes} slots)"


SETTINGS: Mapping[str, Callable[[Plan], str]] = {
    "graph": lambda plan: f"{plan.graph} ({plan.fingerprint})",
    "inputs": lambda plan: ", ".join(plan.inputs) or "unknown",
    "policy": lambda plan: plan.policy,
    "slots": lambda plan: str(len(plan.devices)),
    "machines": _machines,
    "mesh of a stage": _grids,
    "fused products taken apart": lambda plan: str(len(plan.unfused)),
    "virtual stages": lambda plan: str(len(plan.training.placement)) if plan.training else "none",
    **{
        name: _of_training(name)
        for name in ("microbatches", "schedule", "chunks", "recompute", "memory", "zero")
    },
    "bubble": _bubble,
}
"""What a line says of each of two plans, where it is not the same."""
