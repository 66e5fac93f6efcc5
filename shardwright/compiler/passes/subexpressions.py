"""Common subexpressions: what is computed twice is computed once.

Comes in: a graph. Goes out: the same, in which of several equal calls on the same values only the
first is left. What always holds: calls that draw random numbers, or give memory as they find it,
are never taken for equal; a result keeps its layout. A backward that does its forward again to save
memory is a graph of its own, so that nothing done again on purpose is taken out here.
"""

from __future__ import annotations

from functools import cache

import torch

from shardwright.compiler.passes.rewriter import Rewriter, same_layout
from shardwright.ir import IRGraph, IRNode
from shardwright.ir.operators import is_marker, resolve

_UNINITIALIZED = ("aten.empty", "aten.new_empty")
MOST_INPUTS = 16
"""Calls on more tensors, as optimizers', are not compared."""


def merge_common_subexpressions(graph: IRGraph) -> IRGraph:
    """The graph with each call done once; the same where none is done twice."""
    same = _repeated(graph)
    if not same:
        return graph
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        if same.keys().isdisjoint(node.outputs):
            rewriter.keep(node)
        else:
            for value_id in node.outputs:
                rewriter.replace(value_id, same[value_id])
    return rewriter.finish()


def _repeated(graph: IRGraph) -> dict[int, int]:
    """What calls that were done before make, by the first that makes it."""
    same: dict[int, int] = {}
    seen: dict[object, list[IRNode]] = {}
    for node in graph.nodes:
        if len(node.inputs) > MOST_INPUTS or not is_repeatable(node.op):
            continue
        inputs = (same.get(value_id, value_id) for value_id in node.inputs)
        alike = seen.setdefault((node.op, *inputs), [])
        first = next((other for other in alike if _equal(graph, node, other)), None)
        if first is None:
            alike.append(node)
        else:
            same.update(zip(node.outputs, first.outputs, strict=True))
    return same


@cache
def is_repeatable(op: str) -> bool:
    """Whether equal calls give equal results."""
    if is_marker(op) or op.startswith(_UNINITIALIZED):
        return False
    return torch.Tag.nondeterministic_seeded not in resolve(op).tags


def _equal(graph: IRGraph, a: IRNode, b: IRNode) -> bool:
    """Whether two calls of one operator on the same values are the same call."""
    values = graph.values
    return (
        repr(a.attrs) == repr(b.attrs)
        and a.absent == b.absent
        and all(
            same_layout(values[one], values[other])
            for one, other in zip(a.outputs, b.outputs, strict=True)
        )
    )
