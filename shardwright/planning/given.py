"""What planners are given, checked before anything else: slips of the hand, in the user's words."""

from __future__ import annotations

from shardwright.clusters import Cluster
from shardwright.errors import PlanError
from shardwright.ir import IRGraph


def check_graph(graph: object) -> None:
    """Raise PlanError where something else stands in place of a graph."""
    if not isinstance(graph, IRGraph):
        raise PlanError(
            f"a graph is planned, found a {type(graph).__name__}; capture it first: "
            "capture(model, args), or compile_ir(step, inputs) of a training step"
        )


def check_count(name: str, count: object) -> None:
    """Raise PlanError where a number that counts something is none from 1 up."""
    if type(count) is not int or count < 1:
        raise PlanError(f"{name} must be a whole number from 1 up, found {count!r}")


def check_devices(devices: object) -> None:
    """Raise PlanError for what says neither how many slots there are nor which."""
    if not isinstance(devices, Cluster) and (type(devices) is not int or devices < 1):
        raise PlanError(
            f"devices must be a number of slots from 1 up, found {devices!r}; or give a Cluster"
        )


def check_cluster(cluster: object) -> None:
    """Raise PlanError for what is no cluster, or None."""
    if cluster is not None and not isinstance(cluster, Cluster):
        raise PlanError(
            f"cluster must be a Cluster, found {cluster!r}; Cluster.of(2) has two slots"
        )


def check_memory(memory: object) -> None:
    """Raise PlanError for what is no number of bytes of a slot, or None."""
    if memory is not None and not (isinstance(memory, int | float) and memory > 0):
        raise PlanError(f"memory must be a number of bytes above 0, found {memory!r}")
