"""Which dimension of inputs and outputs is the batch's.

The batch is the first dimension of the inputs that a microbatch has its part of. Where nobody said
which they are, it is that of most inputs: their most frequent first size, of several equally
frequent ones the largest. The count that dropout draws from has one a microbatch. An output has it
where dimension annotations lead there from an input.
"""

from __future__ import annotations

from collections import Counter

from shardwright.ir import IRGraph, IRNode
from shardwright.ops.bound import BoundDimop
from shardwright.planning.follow import (
    Annotations,
    Sharded,
    SplitPropagation,
    follow,
    identifier_at,
)
from shardwright.planning.forward import forward_view
from shardwright.tracing.dropout import RNG


def batch_dims(graph: IRGraph) -> dict[int, int]:
    """The batch's dimension of each input that has one, by value id."""
    draws = {v for v in graph.inputs if graph.values[v].name == RNG}
    said = {v: batched for v in graph.inputs if (batched := graph.values[v].batched) is not None}
    if said:
        return {v: 0 for v in graph.inputs if v in draws or said.get(v, False)}
    shapes = {v: graph.values[v].shape for v in graph.inputs if v not in draws}
    counts = Counter(shape[0] for shape in shapes.values() if shape)
    batch = max(counts, key=lambda size: (counts[size], size), default=None)
    return {v: 0 for v in graph.inputs if v in draws or shapes[v][:1] == (batch,)}


def batch_rows(graph: IRGraph) -> int:
    """How many rows the batch has; 0 where no input has one."""
    return max((graph.values[v].shape[dim] for v, dim in batch_dims(graph).items()), default=0)


def follow_batch(
    graph: IRGraph, size: int, annotations: Annotations | None = None
) -> SplitPropagation:
    """The graph split by batch along an axis of ``size`` slots."""
    batched = batch_dims(graph)

    def seed(following: SplitPropagation, node: IRNode, bound: BoundDimop) -> str | None:
        for i, value_id in enumerate(node.inputs):
            if value_id in batched:
                identifier = identifier_at(bound, i, batched[value_id])
                if identifier is not None and following.fits(node, bound, identifier):
                    return identifier
        return None

    return follow(graph, size, seeds=[seed], annotations=annotations)


def batched_outputs(graph: IRGraph) -> dict[int, int]:
    """The batch's dimension of each output that a graph's forward makes, by value id."""
    if not any(graph.values[v].shape for v in graph.outputs):
        return {}
    following = follow_batch(forward_view(graph), 1)
    states = {v: following.state(v) for v in graph.outputs}
    return {v: state.dim for v, state in states.items() if isinstance(state, Sharded)}
