"""Copies around calls: results kept from being written over, and brought where they belong.

Comes in: a lowered graph and its targets, external memory by the value that is to lie there after a
run. Goes out: the graph with calls of ``copy``. What always holds: afterwards no result lies in
memory that is written over, but the one that belongs there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from dataclasses import replace

from shardwright.compiler.inplace import Sharing
from shardwright.kernels.kinds import BY_NAME
from shardwright.kernels.lowered import LoweredGraph, LoweredOp, ValueSpec
from shardwright.kernels.spots import Spot, extent, results, saved

_COPY = BY_NAME["copy"].id


def keep_results(
    graph: LoweredGraph, targets: Mapping[int, int], spots: Mapping[int, Spot]
) -> tuple[LoweredGraph, dict[int, int]]:
    """The graph and its targets, with copies of results that lie in a target's old contents.

    Each is copied as soon as it is there; where there is none, the graph is given as it is.
    """
    wanted = dict.fromkeys([*results(graph), *saved(graph.ops), *targets.values()])
    kept = [vid for vid in wanted if spots[vid].root in targets]
    if not kept:
        return graph, dict(targets)
    values, fresh = dict(graph.values), max(graph.values) + 1
    copies: dict[int, int] = {}
    for k, vid in enumerate(kept):
        copies[vid] = fresh + k
        values[fresh + k] = _dense(graph.values[vid], fresh + k, "kept")
    made = {vid for op in graph.ops for vid in op.out_vids}
    ops = [copy_call(vid, copies[vid], values) for vid in kept if vid not in made]
    for op in graph.ops:
        ops.append(_saving(op, copies))
        ops += [copy_call(vid, copies[vid], values) for vid in op.out_vids if vid in copies]
    changed = replace(
        graph,
        values=values,
        ops=tuple(ops),
        outputs=tuple(copies.get(vid, vid) for vid in graph.outputs),
        updates={old: copies.get(new, new) for old, new in graph.updates.items()},
    )
    return changed, {target: copies.get(vid, vid) for target, vid in targets.items()}


def copy_back(
    graph: LoweredGraph,
    targets: Mapping[int, int],
    sharing: Sharing,
    spots: MutableMapping[int, Spot],
) -> LoweredGraph:
    """The graph with copies at its end into the targets that nothing is made in directly.

    What is copied there has the target's memory in ``sharing``, and a spot of its own.
    """
    if sharing.claimed >= targets.keys():
        return graph
    values, fresh = dict(graph.values), max(graph.values, default=0) + 1
    ops, updates, outputs = list(graph.ops), dict(graph.updates), list(graph.outputs)
    for target, result in targets.items():
        if target in sharing.claimed:
            continue
        values[fresh] = replace(
            values[target], vid=fresh, name=f"{values[target].name}.new", role="tmp", names=()
        )
        ops.append(copy_call(result, fresh, values))
        sharing.owner[fresh] = target
        spots[fresh] = spots[target]._replace(root=fresh)
        if target in updates:
            updates[target] = fresh
        else:
            outputs = [fresh if vid == result else vid for vid in outputs]
        fresh += 1
    return replace(graph, values=values, ops=tuple(ops), updates=updates, outputs=tuple(outputs))


def _saving(op: LoweredOp, copies: Mapping[int, int]) -> LoweredOp:
    """The call, with copies of what it saves in its place."""
    if copies.keys().isdisjoint(op.saved):
        return op
    return replace(op, saved=tuple(copies.get(vid, vid) for vid in op.saved))


def copy_call(source: int, target: int, values: Mapping[int, ValueSpec]) -> LoweredOp:
    """A call that copies one value to another."""
    return LoweredOp(_COPY, 0, b"", (source,), (target,), f"copy of %{values[source].name}")


def _dense(spec: ValueSpec, vid: int, suffix: str) -> ValueSpec:
    """A value like another with memory of its own, in which no two elements are one."""
    strides = spec.strides
    if strides is not None and extent(spec.shape, strides) < math.prod(spec.shape):
        strides = None
    return replace(
        spec, vid=vid, name=f"{spec.name}.{suffix}", role="tmp", names=(), strides=strides
    )
