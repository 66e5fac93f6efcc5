"""Steps between layouts as collectives.

Comes in: a step of a conversion, and what the members of its group hold before and after. Goes out:
the collectives that take it, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from shardwright.errors import CodegenError
from shardwright.sharding import Partial, Placement, RedistributionStep, Replicate, Shard
from shardwright.sharding.ranges import Ranges


class Collective(NamedTuple):
    """A collective: its name, its attributes beside the axis, and what each member then holds."""

    op: str
    attrs: dict[str, Any]
    slices: Sequence[Ranges]


def collectives(
    step: RedistributionStep, before: Sequence[Ranges], after: Sequence[Ranges]
) -> list[Collective]:
    """The collectives of a step. Raises CodegenError for a reduction that none of them does."""
    source, target = step.source, step.target
    if isinstance(source, Shard) and isinstance(target, Shard):
        sizes: dict[str, Any] = {
            "split_dim": target.dim,
            "split_sizes": _sizes(after, target.dim),
            "join_dim": source.dim,
            "join_sizes": _sizes(before, source.dim),
        }
        return [Collective("all_to_all", sizes, after)]
    if isinstance(source, Shard):
        return [Collective("all_gather", _along(source.dim, before), after)]
    is_sum = isinstance(source, Partial) and source.op == "sum"
    if not isinstance(target, Shard):
        return [Collective("all_reduce", {}, after) if is_sum else _extreme(source, after)]
    if is_sum:
        return [Collective("reduce_scatter", _along(target.dim, after), after)]
    own = Collective("own_slice", _along(target.dim, after), after)
    return [own] if isinstance(source, Replicate) else [_extreme(source, before), own]


def _extreme(source: Placement, slices: Sequence[Ranges]) -> Collective:
    """What reduces terms of a maximum or a minimum."""
    op = source.op if isinstance(source, Partial) else ""
    if op not in ("max", "min"):
        raise CodegenError(
            f"slots hold {source}, of which no code is written; let the plan keep the node whole"
        )
    return Collective("all_reduce_extreme", {"op": op}, slices)


def _along(dim: int, slices: Sequence[Ranges]) -> dict[str, Any]:
    return {"dim": dim, "sizes": _sizes(slices, dim)}


def _sizes(slices: Sequence[Ranges], dim: int) -> list[int]:
    return [ranges[dim][1] - ranges[dim][0] for ranges in slices]
