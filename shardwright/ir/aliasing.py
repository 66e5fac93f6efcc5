"""Alias analysis: which values of a graph may share memory.

A value has roots: the values whose memory it may be a view of, itself where its node makes new
memory. Two values without a common root share no memory. Operators say in their schemas what they
return a view of; those that torch composes of others may return an argument as it is (`dropout` in
evaluation), and a few share memory without saying so.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from shardwright.ir.operators import is_marker, resolve
from shardwright.torch_internals import is_composite, schema_of

if TYPE_CHECKING:
    from shardwright.ir.graph import IRGraph

Roots = dict[int, frozenset[int]]
"""Value id to the ids of its roots."""

_UNDECLARED = {"aten._unsafe_view.default", "aten.lift.default"}
"""Operators that return memory of their arguments although their schemas do not say so."""


def memory_roots(graph: IRGraph) -> Roots:
    """The roots of every value."""
    roots: Roots = {}
    for value in graph.values.values():
        if value.producer is None:
            roots[value.id] = frozenset((value.id,))
    for node in graph.nodes:
        shared = not is_marker(node.op) and may_return_an_argument(node.op)
        below = frozenset[int]().union(*(roots[value_id] for value_id in node.inputs))
        for value_id in node.outputs:
            roots[value_id] = below if shared and below else frozenset((value_id,))
    return roots


@cache
def may_return_an_argument(op: str) -> bool:
    """Whether what the operator returns may be in the memory of what it is given."""
    overload = resolve(op)
    return (
        op in _UNDECLARED
        or any(item.alias_info is not None for item in schema_of(overload).returns)
        or is_composite(overload)
    )
