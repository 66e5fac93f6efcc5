"""What of a backward others wait for, and what only the update waits for (zero bubble).

Comes in: nodes of a backward, in order, and the values that are needed early: those that leave
towards earlier stages. Goes out: the nodes that lead to these, and the rest, which is mostly the
gradients of weights and can be done in what would be idle time (Qi et al., Zero Bubble Pipeline
Parallelism, 2023). What always holds: both are in order, early nodes read nothing of late ones, and
together they make what the nodes made, under the same ids.

An operator with an output mask may lead to both. It is run twice, with masks that share nothing,
where that costs no more than running it once: a convolution's gradients are computed one by one
anyway. Those of a norm come out of one pass over the same tensors: a norm stays whole, and early.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from shardwright.ir import IRGraph, IRNode

_SEPARABLE = {"aten.convolution_backward.default": "output_mask"}
"""Operators that compute each of their results by itself, and the name of their mask."""


def split_backward(
    graph: IRGraph, nodes: Sequence[IRNode], early: Collection[int]
) -> tuple[list[IRNode], list[IRNode]]:
    """The nodes that the values ``early`` depend on, and all others.

    A node that is run twice stands in both: the early part under its own id, the late one under a
    fresh id of ``graph``, which is left as it is otherwise.
    """
    needed = set(early)
    first: list[IRNode] = []
    later: list[IRNode] = []
    for node in reversed(nodes):
        if needed.isdisjoint(node.outputs):
            later.append(node)
            continue
        mask = _SEPARABLE.get(node.op)
        if mask is not None and not needed.issuperset(node.outputs):
            later.append(_part(node, mask, set(node.outputs) - needed, graph.fresh_id()))
            node = _part(node, mask, needed, node.id)
        first.append(node)
        needed.update(node.inputs)
    return first[::-1], later[::-1]


def _part(node: IRNode, mask: str, kept: Collection[int], node_id: int) -> IRNode:
    """The node with the results ``kept`` alone."""
    flags = [value_id in kept for value_id in node.results]
    return replace(
        node,
        id=node_id,
        inputs=list(node.inputs),
        outputs=[value_id for value_id in node.outputs if value_id in kept],
        attrs=node.attrs | {mask: flags},
        absent=tuple(i for i, flag in enumerate(flags) if not flag),
    )
