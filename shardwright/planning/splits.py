"""The built-in ways to split along a mesh axis: data, tensor, sequence.

Each is where `follow` begins.

data
    The batch: the first dimension of every input that has the longest such dimension in common.
tensor
    Megatron's: an operator with a stored table or matrix is split by the dimension that only the
    stored tensor and the result have (the columns), and where its other input comes split, by that
    (the rows), which gives a partial sum. Lookups are split by vocabulary.
sequence
    As tensor, and where a partial sum is read it is scattered along the sequence, so that norms and
    elementwise operators between the layers are split too.
"""

from __future__ import annotations

from collections.abc import Callable

from shardwright.dimops.bound import BoundDimop
from shardwright.ir import IRGraph, IRNode
from shardwright.planning.follow import (
    PARTIAL,
    Following,
    Sharded,
    follow,
    identifier_at,
)

LARGE_TABLE = 4
"""A lookup is split by vocabulary where its table has this many times the bytes of its result."""


def data(graph: IRGraph, size: int) -> Following:
    """Split by batch."""
    batch = max(
        (graph.values[v].shape[0] for v in graph.inputs if graph.values[v].shape), default=0
    )
    batched = {v for v in graph.inputs if graph.values[v].shape[:1] == (batch,)}

    def seed(following: Following, node: IRNode, bound: BoundDimop) -> str | None:
        for i, value_id in enumerate(node.inputs):
            if value_id in batched:
                identifier = identifier_at(bound, i, 0)
                if identifier is not None and following.fits(node, bound, identifier):
                    return identifier
        return None

    return follow(graph, size, seed)


def tensor(graph: IRGraph, size: int) -> Following:
    """Split by columns, then rows."""
    return follow(graph, size, _weights, eager=_rows)


def sequence(graph: IRGraph, size: int) -> Following:
    """Split by columns, then rows, and by sequence between."""

    def eager(following: Following, node: IRNode, bound: BoundDimop) -> str | None:
        return (
            _rows(following, node, bound)
            or _weights(following, node, bound)
            or _scattered(following, node, bound)
        )

    return follow(graph, size, _weights, eager=eager)


SPLITTERS: dict[str, Callable[[IRGraph, int], Following]] = {
    "data": data,
    "tensor": tensor,
    "sequence": sequence,
}
"""By the name of a mesh axis or a policy."""


def _weights(following: Following, node: IRNode, bound: BoundDimop) -> str | None:
    """What only a stored tensor and the result have; of lookups, the vocabulary."""
    found: list[tuple[bool, int, str]] = []
    for identifier in bound.identifiers:
        flow = bound.flow(identifier)
        stored = 0
        carried_by_others = False
        for value_id, carry in zip(node.inputs, flow.inputs, strict=True):
            value = following.value(value_id)
            if carry.kind == "shard" and value.is_stored:
                stored += value.nbytes
            elif carry.kind == "shard":
                carried_by_others = True
        matrix = any(
            following.value(v).is_stored and len(following.value(v).shape) > 1 for v in node.inputs
        )
        if stored and matrix and not carried_by_others and following.fits(node, bound, identifier):
            partial = any(carry.kind == "partial" for carry in flow.outputs)
            made = sum(following.value(v).nbytes for v in node.outputs)
            if not partial or stored > LARGE_TABLE * made:
                found.append((partial, stored, identifier))
    return max(found)[2] if found else None


def _rows(following: Following, node: IRNode, bound: BoundDimop) -> str | None:
    """The split of a stored matrix's rows, where the other input comes split that way."""
    if not any(following.value(v).is_stored for v in node.inputs):
        return None
    for i, value_id in enumerate(node.inputs):
        state = following.state(value_id)
        if not isinstance(state, Sharded):
            continue
        identifier = identifier_at(bound, i, state.dim)
        if identifier is None or not following.fits(node, bound, identifier):
            continue
        flow = bound.flow(identifier)
        cuts_stored = any(
            carry.kind == "shard"
            and following.value(v).is_stored
            and len(following.value(v).shape) > 1
            for v, carry in zip(node.inputs, flow.inputs, strict=True)
        )
        if cuts_stored:
            return identifier
    return None


def _scattered(following: Following, node: IRNode, bound: BoundDimop) -> str | None:
    """The sequence dimension of a partial sum: the last but one that can be split."""
    for i, value_id in enumerate(node.inputs):
        if following.state(value_id) == PARTIAL:
            rank = len(following.value(value_id).shape)
            for dim in reversed(range(rank - 1)):
                identifier = identifier_at(bound, i, dim)
                if identifier is not None and following.fits(node, bound, identifier):
                    return identifier
    return None
