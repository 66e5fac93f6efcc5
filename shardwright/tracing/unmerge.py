"""Linear layers on rows that a program merges: ``(a b) k`` becomes ``a b k``.

    reshape (a, b, …) -> (a·b, k)              reshape (a, b, …) -> (a, b, k)
    linear  (a·b, k) -> (a·b, n)        as     linear  (a, b, k) -> (a, b, n)
    view    (a·b, n) -> (a, b, n)

`nn.MultiheadAttention` does so with the batch as ``b``. Dimension annotations cannot follow a
batch that is the inner part of a dimension: only an outermost identifier is split. torch's `linear`
itself merges the leading dimensions of a contiguous input, so each element is computed by the same
call on the same memory, and no bit changes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import accumulate
from operator import mul

import torch

from shardwright.ir.graph import IRGraph
from shardwright.ir.operators import MERGES
from shardwright.ir.tensor_meta import TensorMeta
from shardwright.ir.values import IRNode

_UNMERGES = ("aten.reshape.default", "aten.view.default", "aten.unflatten.int")
_LINEAR = "aten.linear.default"
_BETWEEN = (_LINEAR, "aten.to.dtype")
"""What a chain is made of: casts are there under autocast."""


def unmerge_linear(graph: IRGraph, needed: Collection[int]) -> None:
    """Let linear layers have the leading dimensions that the program merges before them.

    ``needed`` are the values that stay as they are: outputs and updates.
    """
    nodes = graph.node_by_id()
    for node in graph.nodes:
        if chain := _merged_chain(graph, nodes, node, needed):
            _unmerge(graph, chain, node)
            del nodes[node.id]
    graph.nodes[:] = nodes.values()


def _merged_chain(
    graph: IRGraph, nodes: Mapping[int, IRNode], view: IRNode, needed: Collection[int]
) -> list[IRNode]:
    """The nodes on merged rows that ``view`` ends, from the reshape on; empty where none do."""
    if view.op not in _UNMERGES:
        return []
    chain = [view]
    while chain[0] is view or chain[0].op in _BETWEEN:
        value = graph.values[chain[0].inputs[0]]
        before = None if value.producer is None else nodes[value.producer]
        if before is None or value.users != [chain[0].id] or value.id in needed:
            return []
        chain.insert(0, before)
    *chain, _ = chain
    if chain[0].op not in MERGES or _LINEAR not in {node.op for node in chain}:
        return []
    shape = graph.values[view.outputs[0]].shape
    merged = [graph.values[node.outputs[0]].shape for node in chain]
    is_restored = len(shape) == 3 and merged[-1][-1] == shape[-1]
    if not is_restored or any(rows[:-1] != (shape[0] * shape[1],) for rows in merged):
        return []
    return chain if _keeps_memory(graph, chain[0], (*shape[:2], merged[0][-1])) else []


def _keeps_memory(graph: IRGraph, reshape: IRNode, shape: tuple[int, ...]) -> bool:
    """Whether what a node reshapes has this shape as well, and is contiguous in it."""
    before = graph.values[reshape.inputs[0]]
    if before.shape == shape:
        return True
    is_merged_here = shape[0] in accumulate(before.shape, mul)
    return is_merged_here and before.meta.empty().reshape(shape).is_contiguous()


def _unmerge(graph: IRGraph, chain: list[IRNode], view: IRNode) -> None:
    """Give a chain the leading dimensions of what its view makes, which its last node makes now."""
    reshape, last = chain[0], chain[-1]
    final = graph.values[view.outputs[0]]
    for node in chain:
        value = graph.values[node.outputs[0]]
        value.meta = TensorMeta((*final.shape[:2], value.shape[-1]), value.dtype)
    whole = graph.values[reshape.outputs[0]].shape
    if graph.values[reshape.inputs[0]].shape == whole:
        reshape.op, reshape.attrs = "aten.contiguous.default", _CONTIGUOUS.copy()
    else:
        reshape.op, reshape.attrs = "aten.reshape.default", {"shape": list(whole)}
    final.name = graph.values.pop(last.outputs[0]).name
    last.outputs, final.producer = [final.id], last.id


_CONTIGUOUS = {"memory_format": torch.contiguous_format}
