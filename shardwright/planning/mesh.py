"""Plans over a mesh: stages along the axis ``pipeline``, splits along the others.

Along each other axis the whole graph is split as `splits` says, by itself; a node gets what each
axis gives it. Where two axes would cut one identifier finer than its units allow, the inner axis
leaves the node whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from shardwright.clusters import Mesh
from shardwright.errors import PlanError
from shardwright.ir import IRGraph, IRNode
from shardwright.ops.catalog import dimop_of
from shardwright.planning.balance import measure_loads
from shardwright.planning.pipeline import stage_bounds
from shardwright.planning.plan import Assignment, Split, Terms
from shardwright.planning.rules import SPLITTERS

PIPELINE, DATA = "pipeline", "data"
AXES = (PIPELINE, *SPLITTERS)
_SPLIT_BY = {
    DATA: ("the batch, the first dimension of inputs", "use fewer slots, or a larger batch"),
    "tensor": (
        "products with weights, and lookups, by columns, rows, heads and vocabulary",
        "use fewer slots, or another axis",
    ),
    "sequence": (
        "products with weights, and the sequence between them",
        "use fewer slots, or another axis",
    ),
}
"""What an axis splits, and what to do where a graph has none that is long enough."""


def over_mesh(
    graph: IRGraph, axes: Mapping[str, int], devices: Sequence[str]
) -> tuple[list[Assignment], list[str]]:
    """The assignment of each node to slots of a mesh with these axes, and notes.

    Raises PlanError where an axis is unknown or there are more stages than nodes.
    """
    splits, notes = split_nodes(graph, axes)
    whole = Mesh.of(axes, devices)
    stages = whole.along(whole.axis(PIPELINE)) if PIPELINE in axes else (whole,)
    bounds = stage_bounds(graph, measure_loads(graph), len(stages))
    assigned = [
        Assignment(mesh, splits[i])
        for mesh, (start, stop) in zip(stages, pairwise(bounds), strict=True)
        for i in range(start, stop)
    ]
    return assigned, notes


def split_nodes(
    graph: IRGraph, axes: Mapping[str, int]
) -> tuple[list[tuple[Split | Terms | None, ...]], list[str]]:
    """What each axis but ``pipeline`` splits of each node, and notes. Raises PlanError."""
    if unknown := [axis for axis in axes if axis not in AXES]:
        raise PlanError(f"unknown mesh axis {unknown[0]!r}; known are {', '.join(AXES)}")
    inner = [axis for axis in axes if axis != PIPELINE]
    found = [_split(graph, axis, axes[axis]) for axis in inner]
    sizes = [axes[axis] for axis in inner]
    splits = [
        compatible(graph, node, sizes, [column[i] for column in found])
        for i, node in enumerate(graph.nodes)
    ]
    return splits, whole_notes(graph, splits)


def _split(graph: IRGraph, axis: str, size: int) -> list[Split | Terms | None]:
    """The split of each node along an axis. Raises PlanError where there is none at all."""
    splits = SPLITTERS[axis](graph, size).splits()
    if size > 1 and not any(splits):
        parts, advice = _SPLIT_BY[axis]
        raise PlanError(
            f"nothing in the graph {graph.name!r} can be split in {size} along the mesh axis "
            f"{axis!r}, which splits {parts}: there is nothing of the kind, or it is too short or "
            f"read by what cannot take a part; {advice}"
        )
    return splits


def compatible(
    graph: IRGraph, node: IRNode, sizes: Sequence[int], splits: Sequence[Split | Terms | None]
) -> tuple[Split | Terms | None, ...]:
    """The splits of all axes, without those that would leave a slot without a unit."""
    parts: dict[str, int] = {}
    kept: list[Split | Terms | None] = []
    for split, size in zip(splits, sizes, strict=True):
        if isinstance(split, Split) and split.identifier in parts:
            bound = dimop_of(graph, node)
            assert bound is not None
            fine = bound.length(split.identifier) % (parts[split.identifier] * size * split.unit)
            split = None if fine else split
        if isinstance(split, Split):
            parts[split.identifier] = parts.get(split.identifier, 1) * size
        kept.append(split)
    return tuple(kept)


def whole_notes(graph: IRGraph, splits: Sequence[tuple[Split | Terms | None, ...]]) -> list[str]:
    """Which operators every slot computes for want of an annotation."""
    whole = {
        node.op
        for node, found in zip(graph.nodes, splits, strict=True)
        if found and not any(found) and dimop_of(graph, node) is None
    }
    if not whole:
        return []
    return [f"without an annotation, so done whole by every slot: {', '.join(sorted(whole))}"]
