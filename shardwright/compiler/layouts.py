"""Copies around calls whose operands do not lie in memory as the call demands.

Comes in: a lowered graph and its spots. Goes out: the same graph, in which calls that must have
contiguous operands, or operands that lie alike, have them: inputs that do not are copied before,
outputs that shall not are made beside and copied after. Where there are none the graph is given as
it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from shardwright.compiler.keeping import copy_call
from shardwright.ir.tensor_meta import contiguous_strides, strides_or_none
from shardwright.kernels.kinds import kind_of
from shardwright.kernels.lowered import ABSENT, LoweredGraph, LoweredOp, ValueSpec
from shardwright.kernels.spots import Spot, extent, same_order

Strides = tuple[int, ...]


def meet_layouts(graph: LoweredGraph, spots: Mapping[int, Spot]) -> LoweredGraph:
    """The graph, with copies where calls are constrained to other strides than operands have."""
    values = dict(graph.values)
    ops: list[LoweredOp] = []
    for op in graph.ops:
        wanted = dict(_wanted(op, spots)) if op.must("alike") or op.must("contiguous") else {}
        ops += _with_copies(op, wanted, values) if wanted else [op]
    if len(ops) == len(graph.ops):
        return graph
    return replace(graph, values=values, ops=tuple(ops))


def _with_copies(
    op: LoweredOp, wanted: Mapping[int, Strides], values: dict[int, ValueSpec]
) -> list[LoweredOp]:
    """The call on copies that lie as is wanted; ``values`` grows by these."""
    fresh = max(values) + 1
    copies = {vid: fresh + k for k, vid in enumerate(wanted)}
    for vid, copy in copies.items():
        spec = values[vid]
        strides = strides_or_none(spec.shape, wanted[vid])
        values[copy] = replace(
            spec, vid=copy, name=f"{spec.name}.laid", role="tmp", strides=strides, names=()
        )
    ins, outs = (tuple(copies.get(v, v) for v in vids) for vids in (op.in_vids, op.out_vids))
    made = set(op.out_vids)
    return [
        *(copy_call(vid, copies[vid], values) for vid in wanted if vid not in made),
        replace(op, in_vids=ins, out_vids=outs),
        *(copy_call(copies[vid], vid, values) for vid in wanted if vid in made),
    ]


def _wanted(op: LoweredOp, spots: Mapping[int, Spot]) -> Iterator[tuple[int, Strides]]:
    """The operands that lie otherwise than they must, and the strides that they must have."""
    contiguous = op.must("contiguous")
    for row in _rows(op):
        first: Spot | None = None
        for vid in row:
            if vid == ABSENT:
                continue
            spot = spots[vid]
            first = first or spot
            if not contiguous and spot.shape != first.shape:
                continue
            as_first = not contiguous and _is_dense(first)
            strides = first.strides if as_first else contiguous_strides(spot.shape)
            if 0 not in spot.shape and not same_order(spot.shape, spot.strides, strides):
                yield vid, strides


def _rows(op: LoweredOp) -> list[Sequence[int]]:
    """The operands that belong together: a parameter's, or all of the call."""
    kind = kind_of(op.kind_id)
    if not kind.lists:
        return [(*op.in_vids, *op.out_vids)]
    count = len(op.in_vids) // kind.lists
    listed = op.in_vids[: count * kind.lists]
    rows: list[Sequence[int]] = [(*listed[k::count], *op.out_vids[k::count]) for k in range(count)]
    return [*rows, op.in_vids[count * kind.lists :]]


def _is_dense(spot: Spot) -> bool:
    """Whether the elements lie without gaps, each once."""
    return math.prod(spot.shape) == extent(spot.shape, spot.strides)
