"""Plan: which device slot runs which node of one graph.

A plan belongs to the graph it was made for: it holds the graph's fingerprint, and `build` refuses
another. It names nodes by their position in execution order, after its table splits were made
(`tables.split_tables`).
"""

from __future__ import annotations

import hashlib

import msgspec

from shardwright.errors import PlanError
from shardwright.ir import IRGraph
from shardwright.ir.repeats import fingerprint


class Stage(msgspec.Struct, frozen=True):
    """What one device slot runs.

    ``nodes`` are positions, ascending. ``work`` is in estimated floating-point operations a run,
    ``stored_bytes`` counts each parameter and buffer of the slot once, ``received_bytes`` what
    other slots send it in a run.
    """

    device: str
    nodes: tuple[int, ...]
    work: int
    stored_bytes: int
    received_bytes: int


class TableSplit(msgspec.Struct, frozen=True):
    """A lookup table cut by columns over all slots: the embedding at position ``node``."""

    node: int
    parts: int


class Plan(msgspec.Struct, frozen=True):
    """Stages in the order of the data; ``notes`` say in words what was decided and why."""

    graph: str
    fingerprint: str
    policy: str
    stages: tuple[Stage, ...]
    table_splits: tuple[TableSplit, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        work = sum(stage.work for stage in self.stages) or 1
        stored = sum(stage.stored_bytes for stage in self.stages) or 1
        lines = [f"plan for {self.graph}: {self.policy}, {len(self.stages)} stages"]
        for stage in self.stages:
            lines.append(
                f"  {stage.device}: {len(stage.nodes)} nodes, "
                f"{100 * stage.work / work:.1f}% of the work, "
                f"{stage.stored_bytes / 1e6:.2f} MB stored "
                f"({100 * stage.stored_bytes / stored:.1f}%), "
                f"receives {stage.received_bytes / 1e6:.3f} MB"
            )
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def fingerprint_graph(graph: IRGraph) -> str:
    """A hash of what a graph computes: operators, attributes, shapes, and how they connect."""
    digest = hashlib.sha256()
    for value_id in graph.inputs:
        value = graph.values[value_id]
        digest.update(repr((value_id, value.shape, value.dtype)).encode())
    for node in graph.nodes:
        digest.update(repr((fingerprint(graph, node), node.inputs, node.outputs)).encode())
    digest.update(repr((graph.outputs, graph.updates)).encode())
    return digest.hexdigest()[:16]


def check_belongs(plan: Plan, graph: IRGraph) -> None:
    """Raise PlanError where ``plan`` was made for another graph."""
    found = fingerprint_graph(graph)
    if found != plan.fingerprint:
        raise PlanError(
            f"the plan was made for the graph {plan.graph!r} ({plan.fingerprint}), this is "
            f"{graph.name!r} ({found}); plan again for this graph"
        )
