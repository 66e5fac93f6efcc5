"""A contiguous copy of a concatenation in another order is a concatenation in that order.

    clone(permute(cat(a, b, c)))   becomes   cat(permute(a), permute(b), permute(c))

Comes in: a graph. Goes out: the same, with one copy where there were two: the gradients of queries,
keys and values that attention's backward leaves stacked go straight to the layout that the gradient
of their common projection is read in.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardwright.compiler.passes.rewriter import Rewriter, same_layout
from shardwright.ir import IRGraph, IRNode
from shardwright.ir.dtypes import dtype_name
from shardwright.ir.inference import Inference
from shardwright.ir.values import Input, IRValue

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
    found = IRValue(-1, "", tuple(told.shape), dtype_name(told.dtype), strides=told.stride())
    if not same_layout(found, made):
        return False
    rewriter.emit(_CAT, parts, [made], attrs, clone)
    return True
