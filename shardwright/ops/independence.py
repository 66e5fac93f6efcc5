"""Whether a graph keeps the rows of a dimension apart.

Input: a graph, and which dimension of which inputs has the rows (a batch, the tokens of a layer
that sees one at a time). Output: which dimension of each result has them, so that row i of it is
made from row i of the inputs alone, as dimension annotations say, and is the same however many
there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from shardwright.errors import InputError
from shardwright.ir import IRGraph, IRNode
from shardwright.ir.operators import MERGES
from shardwright.ir.repeats import fingerprint
from shardwright.ir.values import Source
from shardwright.ops.bound import BoundDimop
from shardwright.ops.catalog import dimop_of


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


Kind = Literal["rows", "even", "number", "numbered", "counted"]
"""What is along a dimension that has a length for each row.

``rows`` are made from those of inputs. Others are made from their number: ``even`` ones are all the
same, ``numbered`` ones the same however many there are, of which a ``number`` is 0, 1, 2 and so on;
``counted`` is everything else.
"""
Ends = Mapping[Source | None, Mapping[str, frozenset[int]]]
"""By line and operator, the dimensions of as many rows that it makes of their number."""
EVEN = {
    *("zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "expand"),
    *("new_zeros", "new_ones", "new_full", "broadcast_to", "repeat"),
}
SAME = {"unsqueeze", "view", "reshape", "expand", "clone", "to", "contiguous", "alias"}
"""Operators whose results have the elements of their input."""
TABLES = {"index", "embedding", "gather", "index_select"}
"""Operators that look up what is along a dimension."""


class RowDim(NamedTuple):
    """What a value has along a dimension; None where it is not known which."""

    kind: Kind
    dim: int | None


@dataclass(slots=True)
class RowFlow:
    """Follows rows through a graph.

    rows
        How many there are, above 1.
    ends
        Where the graph makes tensors of as many.
    """

    graph: IRGraph
    rows: int
    ends: Ends = field(default_factory=dict)
    annotations: Annotations = field(init=False)

    def __post_init__(self) -> None:
        self.annotations = Annotations(self.graph)

    def follow(self, given: Mapping[int, int], results: Iterable[int]) -> dict[int, int | None]:
        """The dimension of each result that has rows, if inputs have them along these.

        Raises InputError where an operator mixes them, or computes with their number.
        """
        found = {value: RowDim("rows", dim) for value, dim in given.items()}
        for node in self.graph.nodes:
            bound = self.annotations.of(node)
            read = {
                i: found[value]
                for i, value in enumerate(node.inputs)
                if value in found and not _reads_dtype(bound, i)
            }
            found |= self._through(node, bound, read) if read else self._made(node)
        ends = {value: found.get(value) for value in results}
        for value, along in ends.items():
            if along is not None and along.kind == "counted":
                raise InputError(f"{self.graph.values[value].name!r} depends on how many there are")
        return {value: None if along is None else along.dim for value, along in ends.items()}

    def _made(self, node: IRNode) -> dict[int, RowDim]:
        """What a node that reads nothing of as many rows makes of their number."""
        name, found = node.op.split(".")[1], {}
        line = self.ends.get(node.source, {})
        # An operator that torch runs as others is not there.
        ends = line.get(name, frozenset().union(*line.values()))
        for value in node.outputs:
            shape = self.graph.values[value].shape
            dims = [d for d in ends if d < len(shape) and shape[d] % self.rows == 0]
            if len(dims) == 1:
                found[value] = RowDim(self._kind(name, node, dims[0]), dims[0])
            elif dims:
                found[value] = RowDim("counted", None)
        return found

    def _kind(self, name: str, node: IRNode, dim: int) -> Kind:
        """What an operator makes of the number of rows."""
        if name == "repeat":  # Of one, or of several in turn.
            shape = self.graph.values[node.inputs[0]].shape
            before = dim - (len(self.graph.values[node.outputs[0]].shape) - len(shape))
            return "even" if before < 0 or shape[before] == 1 else "counted"
        if name in EVEN:
            return "even"
        if name == "slice" and (node.attrs["start"], node.attrs["step"]) == (0, 1):
            return "numbered"
        if name == "arange":
            begins = (node.attrs.get("start", 0), node.attrs.get("step", 1))
            return "number" if begins == (0, 1) else "numbered"
        return "counted"

    def _through(
        self, node: IRNode, bound: BoundDimop | None, read: Mapping[int, RowDim]
    ) -> dict[int, RowDim]:
        """What a node makes. Raises InputError where it mixes rows."""
        kinds = {along.kind for along in read.values()}
        if "rows" not in kinds:
            return self._beside(node, bound, read)
        if bound is None:
            raise _error(node, "has no dimension annotation, so it may mix the rows")
        by_number = _looked_up(node, read)
        rows = {i: along for i, along in read.items() if along.kind == "rows" and i != by_number}
        if by_number is not None:
            rows |= {i: along for i, along in read.items() if along.kind == "number"}
        names = {_name(bound, i, along) for i, along in rows.items()}
        name = names.pop()
        if names or name is None or bound.length(name) % self.rows:
            raise _mixing(node)
        if any(carry.kind != "shard" for carry in bound.flow(name).outputs):
            raise _mixing(node)
        for i, along in read.items():
            if i != by_number and not _fits(node, bound, name, i, along):
                raise (
                    _mixing(node)
                    if along.kind == "rows"
                    else _error(node, "computes with the number of rows")
                )
        carries = zip(node.outputs, bound.flow(name).outputs, strict=True)
        return {value: RowDim("rows", carry.dim) for value, carry in carries}

    def _beside(
        self, node: IRNode, bound: BoundDimop | None, read: Mapping[int, RowDim]
    ) -> dict[int, RowDim]:
        """What a node makes of what is made from the number of rows alone."""
        counted = dict.fromkeys(node.outputs, RowDim("counted", None))
        if bound is None:
            return counted
        names = {_name(bound, i, along): along.kind for i, along in read.items()}
        ordered = sorted(names, key=lambda name: (names[name] == "even", name is None))
        name = ordered[0]
        if (
            name is None
            or bound.length(name) % self.rows
            or not all(_fits(node, bound, name, i, along) for i, along in read.items())
        ):
            return counted
        aligned = {a.kind for i, a in read.items() if bound.flow(name).inputs[i].kind == "shard"}
        kind: Kind = "even" if aligned == {"even"} else "numbered"
        if aligned == {"number"} and node.op.split(".")[1] in SAME:
            kind = "number"
        carries = zip(node.outputs, bound.flow(name).outputs, strict=True)
        return {
            value: RowDim(kind, carry.dim) if carry.kind == "shard" else RowDim("counted", None)
            for value, carry in carries
        }


def _reads_dtype(bound: BoundDimop | None, idx: int) -> bool:
    """Whether a node reads of an input its dtype and device alone."""
    return bound is not None and bound.inference.annotation.inputs[idx].dims is None


def _looked_up(node: IRNode, read: Mapping[int, RowDim]) -> int | None:
    """The input whose rows an index takes by their numbers; None where there is none."""
    is_index = node.op.split(".")[1] == "index" and node.attrs.get("indices", [None])[0] is not None
    table, first = read.get(0), read.get(1)
    if not is_index or table is None or first is None or table != RowDim("rows", 0):
        return None
    return 0 if first.kind == "number" else None


def _name(bound: BoundDimop, idx: int, along: RowDim) -> str | None:
    """The identifier of what is along a dimension of an input."""
    return None if along.dim is None else identifier_at(bound, idx, along.dim)


def _fits(node: IRNode, bound: BoundDimop, name: str, idx: int, along: RowDim) -> bool:
    """Whether row i of a node's results, along ``name``, takes row i of an input, or any."""
    carry = bound.flow(name).inputs[idx]
    if (carry.kind, carry.dim) == ("shard", along.dim):
        return along.kind != "counted"
    return along.kind == "even" and (carry.kind == "any" or node.op.split(".")[1] in TABLES)


def _mixing(node: IRNode) -> InputError:
    """The error for a node behind which there are no rows."""
    if node.op in MERGES:
        return _error(node, "reshapes the rows so that they cannot be followed")
    return _error(node, "mixes the rows")


def _error(node: IRNode, what: str) -> InputError:
    """What a node does that no rows are behind, and at which line."""
    place = f"{node.op.split('.')[1]}{f' in {node.scope}' if node.scope else ''}"
    line = f" ({node.source.file}:{node.source.line})" if node.source is not None else ""
    return InputError(f"{place} {what}{line}")
