"""Collectives as nodes of a stage's graph: how they are written, and which a redistribution takes.

A collective is a marker (`shardwright.ir.operators.is_marker`): one input, one output, and as
attributes the mesh axis that it goes along and what the function of that name in
`shardwright.codegenerate.support.exchanges` takes behind it. The collectives of a partition's slots
are the same, in one order; what differs between slots is found at run time from ``self.slots``. A
collective of which only one slot would need the result is done by all, or by none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardwright.codegenerate.spelling.literals import listed, literal
from shardwright.errors import CodegenError
from shardwright.ir import IRNode
from shardwright.sharding import Partial, Placement, RedistributionStep, Replicate, Shard
from shardwright.sharding.ranges import Ranges

SLOTS = "slots"
"""The attribute of a generated class that knows where in the mesh it is."""

COLLECTIVES: Mapping[str, tuple[str, ...]] = {
    "all_reduce": (),
    "all_reduce_extreme": ("op",),
    "all_gather": ("dim", "sizes"),
    "all_gather_for_parts": ("dim", "sizes"),
    "reduce_scatter": ("dim", "sizes"),
    "own_slice": ("dim", "sizes"),
    "all_to_all": ("split_dim", "split_sizes", "join_dim", "join_sizes"),
    "copy_to_parts": (),
    "term_of_first": (),
    "gradient_to_first": (),
}
"""The attributes of each collective beside ``axis``, in the order of its arguments."""

ALONE = frozenset({"term_of_first", "gradient_to_first"})
"""Those in which nothing is communicated, forward or backward."""


def is_collective(node: IRNode) -> bool:
    """Whether a node of a stage is a collective."""
    return node.op in COLLECTIVES


def spell_collective(node: IRNode, operands: Mapping[int, str]) -> str:
    """The call of a collective; ``operands`` are expressions by value id.

    Raises CodegenError where the node is none.
    """
    if not is_collective(node):
        raise CodegenError(f"{node.op} is no collective; there are {', '.join(COLLECTIVES)}")
    arguments = [str(operands[node.inputs[0]]), f"self.{SLOTS}[{_text(node.attrs['axis'])}]"]
    arguments += [f"{name}={_text(node.attrs[name])}" for name in COLLECTIVES[node.op]]
    return f"{node.op}({', '.join(arguments)})"


def _text(value: Any) -> str:
    """A literal; lists are written as tuples."""
    if isinstance(value, list):
        return listed([_text(item) for item in value])
    return literal(value)


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
