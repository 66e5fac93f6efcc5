"""What planners are asked for, checked before anything else, in the user's words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.clusters import Cluster
from shardwright.errors import PlanError, ScheduleError
from shardwright.ir import IRGraph
from shardwright.planning.rules import DATA
from shardwright.schedules import Schedule, make_schedule

RECOMPUTE = ("none", "full", "auto")


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What a training plan is asked for."""

    microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int | None = None
    recompute: str = "none"
    memory: int | None = None
    zero: int = 0

    def check(self, axes: Mapping[str, int]) -> None:
        """Raise PlanError for what is not to be had on a mesh with these axes."""
        if type(self.microbatches) is not int or self.microbatches < 1:
            raise PlanError(f"microbatches must be a number from 1 up, found {self.microbatches!r}")
        if self.recompute not in RECOMPUTE:
            raise PlanError(f"recompute is one of {', '.join(RECOMPUTE)}, found {self.recompute!r}")
        if (self.recompute == "auto") != (self.memory is not None):
            raise PlanError(
                "recompute='auto' keeps a slot's activations within memory= bytes: give both, or "
                f"neither (found recompute={self.recompute!r}, memory={self.memory!r})"
            )
        if self.memory is not None and (type(self.memory) is not int or self.memory < 1):
            raise PlanError(f"memory must be a number of bytes from 1 up, found {self.memory!r}")
        if self.zero not in (0, 1):
            raise PlanError(f"zero is 0 or 1, found {self.zero!r}")
        if self.zero and axes.get(DATA, 1) == 1:
            raise PlanError(
                "zero=1 splits the optimizer's state along the mesh axis 'data', which the mesh "
                "lacks; add the axis, or leave zero out"
            )

    def schedule_on(self, ranks: int) -> Schedule:
        """The schedule for so many pipeline ranks. Raises PlanError."""
        try:
            return make_schedule(
                self.schedule, ranks=ranks, microbatches=self.microbatches, chunks=self.chunks
            )
        except ScheduleError as error:
            raise PlanError(str(error)) from None


# --- checks ---------------------------------------------------------------------------------------


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
