"""Whether a graph keeps the rows of a dimension apart.

Input: a graph, and which dimension of which inputs has the rows (a batch, the tokens of a layer
that sees one at a time). Output: which dimension of each result has them, so that row i of it is
made from row i of the inputs alone, as dimension annotations say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwright.errors import InputError
from shardwright.ir import IRGraph, IRNode
from shardwright.ir.operators import MERGES
from shardwright.ir.repeats import fingerprint
from shardwright.ops.bound import BoundDimop
from shardwright.ops.catalog import dimop_of


class Rows(NamedTuple):
    """A tensor has rows ``start`` to ``stop`` along ``dim``, each as long."""

    dim: int
    start: int
    stop: int


@dataclass(slots=True)
class Annotations:
    """What the nodes of a graph are by dimension annotations, looked up once for equal nodes."""

    graph: IRGraph
    nodes: dict[int, IRNode] = field(init=False)
    _by_node: dict[int, BoundDimop | None] = field(default_factory=dict)
    _by_kind: dict[object, BoundDimop | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nodes = self.graph.node_by_id()

    def of(self, node: IRNode) -> BoundDimop | None:
        """The annotation of a node for its shapes; None where it has none."""
        if node.id not in self._by_node:
            kind = fingerprint(self.graph, node)
            if kind not in self._by_kind:
                self._by_kind[kind] = dimop_of(self.graph, node)
            self._by_node[node.id] = self._by_kind[kind]
        return self._by_node[node.id]


def identifier_at(bound: BoundDimop, idx: int, dim: int) -> str | None:
    """The identifier by which dimension ``dim`` of input ``idx`` can be split, None where none."""
    for identifier in bound.identifiers:
        carry = bound.flow(identifier).inputs[idx]
        if carry.kind == "shard" and carry.dim == dim:
            return identifier
    return None


def follow_rows(
    graph: IRGraph, given: Sequence[Rows | None], annotations: Annotations, ends: Sequence[int]
) -> list[Rows | None]:
    """The rows of what a graph makes. Raises InputError where an operator mixes them."""
    rows = {v: r for v, r in zip(graph.inputs, given, strict=True) if r is not None}
    for node in graph.nodes:
        read = {i: rows[value] for i, value in enumerate(node.inputs) if value in rows}
        if read:
            rows |= _through_node(annotations, node, read)
    return [rows.get(value_id) for value_id in ends]


def _through_node(
    annotations: Annotations, node: IRNode, read: Mapping[int, Rows]
) -> dict[int, Rows]:
    """The rows in what a node makes. Raises InputError where it mixes them."""
    bound = annotations.of(node)
    if bound is None:
        raise InputError(f"{_place(node)} has no dimension annotation, so it may mix the rows")
    (start, stop), *others = {(rows.start, rows.stop) for rows in read.values()}
    if stop - start == 1:
        raise InputError(f"{_place(node)} has one row on a device, of which nothing is known")
    names = {identifier_at(bound, i, rows.dim) for i, rows in read.items()}
    name = names.pop()
    if others or names or name is None or bound.length(name) % (stop - start):
        raise _mixing(node)
    flow = bound.flow(name)
    agree = all(
        (flow.inputs[i].kind, flow.inputs[i].dim) == ("shard", rows.dim) for i, rows in read.items()
    )
    if not agree or any(carry.kind != "shard" for carry in flow.outputs):
        raise _mixing(node)
    made = zip(node.outputs, flow.outputs, strict=True)
    return {v: Rows(carry.dim, start, stop) for v, carry in made if carry.dim is not None}


def _mixing(node: IRNode) -> InputError:
    """The error for a node behind which there are no rows."""
    if node.op in MERGES:
        return InputError(f"{_place(node)} reshapes the rows so that they cannot be followed")
    return InputError(f"{_place(node)} mixes the rows")


def _place(node: IRNode) -> str:
    return f"{node.op.split('.')[1]}{f' in {node.scope}' if node.scope else ''}"
