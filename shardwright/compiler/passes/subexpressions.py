"""Common subexpressions: what is computed twice is computed once.

Comes in: a graph. Goes out: the same, in which of several equal calls on the same values only the
first is left. What always holds: calls that draw random numbers, or give memory as they find it,
are never taken for equal; a result keeps its layout. A backward that does its forward again to save
memory is a graph of its own, so that nothing done again on purpose is taken out here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch

from shardwright.compiler.passes.rewriter import Rewriter, same_layout
from shardwright.ir import IRGraph, IRNode
from shardwright.ir.inference import Inference
from shardwright.ir.operators import is_marker, resolve
from shardwright.ir.tensor_meta import TensorMeta, dtype_name
from shardwright.ir.values import Input, IRValue

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


# --- concatenations -------------------------------------------------------------------------------
#
#     clone(permute(cat(a, b, c)))   becomes   cat(permute(a), permute(b), permute(c))
#
# One copy where there were two: the gradients of queries, keys and values that attention's backward
# leaves stacked go straight to the layout that the gradient of their projection is read in.


_CAT = "aten.cat.default"
_PERMUTE = "aten.permute.default"
_CLONE = "aten.clone.default"


def order_concatenations(graph: IRGraph, known: Inference | None = None) -> IRGraph:
    """The graph with concatenations in the order in which they are read."""
    nodes = graph.node_by_id()
    found = {
        node.id: path
        for node in graph.nodes
        if node.op == _CLONE and (path := _path(graph, nodes, node)) is not None
    }
    if not found:
        return graph
    rewriter = Rewriter(graph, known)
    for node in graph.nodes:
        path = found.get(node.id)
        if path is None or not _write(rewriter, node, *path):
            rewriter.keep(node)
    return rewriter.finish(prune=True)


def _path(
    graph: IRGraph, nodes: Mapping[int, IRNode], clone: IRNode
) -> tuple[IRNode, IRNode] | None:
    """The permutation and the concatenation before a contiguous copy, where only it reads them."""
    if clone.attrs["memory_format"] is not torch.contiguous_format:
        return None
    permute = _made_for(graph, nodes, clone.inputs[0], _PERMUTE)
    if permute is None:
        return None
    cat = _made_for(graph, nodes, permute.inputs[0], _CAT)
    return None if cat is None else (permute, cat)


def _made_for(graph: IRGraph, nodes: Mapping[int, IRNode], value_id: int, op: str) -> IRNode | None:
    """The node that makes a value, where it is ``op`` and one other alone reads the value."""
    value = graph.values[value_id]
    kept = value.role == "output" or value_id in graph.updates.values()
    if value.producer is None or kept or len(value.users) != 1:
        return None
    return nodes[value.producer] if nodes[value.producer].op == op else None


def _write(rewriter: Rewriter, clone: IRNode, permute: IRNode, cat: IRNode) -> bool:
    """Append the concatenation in its new order; not where it would lie in another way."""
    source = rewriter.source
    made = source.values[clone.outputs[0]]
    ndim = len(made.shape)
    dims = [dim % ndim for dim in permute.attrs["dims"]]
    dim = dims.index(cat.attrs["dim"] % ndim)
    parts = []
    for value_id in cat.inputs:
        call = {"dims": dims}
        name = source.values[value_id].name
        (part,) = rewriter.call(_PERMUTE, [rewriter.now(value_id)], call, permute, name)
        assert part is not None
        parts.append(part)
    attrs = {"tensors": [Input(i) for i in range(len(parts))], "dim": dim}
    (told,) = rewriter.inference.outputs(_CAT, [rewriter.of(i) for i in parts], attrs)
    assert told is not None
    found = IRValue(-1, "", TensorMeta(tuple(told.shape), dtype_name(told.dtype), told.stride()))
    if not same_layout(found, made):
        return False
    rewriter.emit(_CAT, parts, [made], attrs, clone)
    return True
