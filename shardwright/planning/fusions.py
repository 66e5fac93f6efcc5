"""Fused products: one product with a stored weight that computes several things at once.

A model may compute several things in one product and take the result apart afterwards, as GPT-2
does with queries, keys and values: `linear` to 3·n columns, then `split` in three. The columns of
such a product cannot be divided over slots by heads, because a range of them holds one part whole
and nothing of another. `unfuse` takes such products apart; here they are found.

What is fused is read from dimension annotations: a node that has an identifier in its stored inputs
and its result only, whose result is only taken apart (`TAKINGS`) along the outermost factor of that
identifier, in ranges that do not overlap. What stands between (views, permutations, anything of one
tensor that passes the identifier on) is done to each part. Where the parts are interleaved (heads
outermost, then queries, keys and values) the product divides by heads as it is, and stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, pairwise

from shardwright.ir import IRGraph, IRNode, IRValue
from shardwright.ir.operators import is_marker
from shardwright.ir.repeats import fingerprint
from shardwright.ops.bound import BoundDimop
from shardwright.ops.catalog import dimop_of
from shardwright.ops.dimop import Cut

Range = tuple[int, int]
"""Half-open."""


# --- taking apart -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Taking:
    """Which range of ``dim`` each output of a node is; ``drop``: without that dimension."""

    dim: int
    ranges: tuple[Range, ...]
    drop: bool = False


def _pieces(node: IRNode, whole: IRValue, made: Sequence[IRValue]) -> Taking:
    """Neighbours along a dimension: split, chunk."""
    dim = _dim(node, whole)
    bounds = accumulate((value.shape[dim] for value in made), initial=0)
    return Taking(dim, tuple(pairwise(bounds)))


def _rows(node: IRNode, whole: IRValue, made: Sequence[IRValue]) -> Taking:
    """Each index of a dimension: unbind."""
    return Taking(_dim(node, whole), tuple((i, i + 1) for i in range(len(made))), drop=True)


def _row(node: IRNode, whole: IRValue, made: Sequence[IRValue]) -> Taking:
    """One index of a dimension: select."""
    dim = _dim(node, whole)
    index = int(node.attrs["index"]) % whole.shape[dim]
    return Taking(dim, ((index, index + 1),), drop=True)


def _range(start: str) -> Callable[[IRNode, IRValue, Sequence[IRValue]], Taking | None]:
    """A range of a dimension, beginning at the argument called ``start``: slice, narrow."""

    def taking(node: IRNode, whole: IRValue, made: Sequence[IRValue]) -> Taking | None:
        dim = _dim(node, whole)
        size, length = whole.shape[dim], made[0].shape[dim]
        first = int(node.attrs[start] or 0)
        first = min(max(first + size if first < 0 else first, 0), size)
        dense = node.attrs.get("step", 1) == 1 and length > 0
        return Taking(dim, ((first, first + length),)) if dense else None

    return taking


TAKINGS: Mapping[str, Callable[[IRNode, IRValue, Sequence[IRValue]], Taking | None]] = {
    **dict.fromkeys(
        (
            "aten.split.Tensor",
            "aten.split.sizes",
            "aten.split_with_sizes.default",
            "aten.chunk.default",
            "aten.unsafe_chunk.default",
            "aten.tensor_split.sections",
            "aten.tensor_split.indices",
        ),
        _pieces,
    ),
    "aten.unbind.int": _rows,
    "aten.select.int": _row,
    "aten.slice.Tensor": _range("start"),
    "aten.narrow.default": _range("start"),
}
"""Operators that hand out ranges of one dimension."""


def _dim(node: IRNode, value: IRValue) -> int:
    return int(node.attrs["dim"]) % max(len(value.shape), 1)


# --- finding ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Along:
    """Where the identifier runs in a value: along ``dim``, each index of which is ``steps`` of it.

    ``steps`` may be a fraction: of 96 columns in heads of 8 each is an eighth of a head.
    """

    dim: int
    steps: Fraction


@dataclass(frozen=True, slots=True)
class Passing:
    """A node that is done to each part: it hands on what its own ``identifier`` covers.

    One value of that identifier is ``steps`` of the fused one.
    """

    bound: BoundDimop
    identifier: str
    steps: Fraction

    def cut(self, part: Range) -> Cut | None:
        """The part in values of the node's identifier; None where it is no whole number."""
        whole = _whole(edge / self.steps for edge in part)
        return None if whole is None else Cut(*whole)


@dataclass(slots=True)
class Fusion:
    """One fused product: the parts, and what is done to them until they are taken."""

    product: Passing
    parts: list[Range] = field(default_factory=list)
    passing: dict[int, tuple[Passing, list[Range]]] = field(default_factory=dict)
    """By node id: nodes between the product and the takings, and the parts that come by."""
    takings: dict[int, tuple[Taking, list[Range]]] = field(default_factory=dict)
    """By node id: which part each output is."""


def find_fusions(graph: IRGraph) -> dict[int, Fusion]:
    """The fused products of a graph, by position, in order.

    A fused weight is split only where everything that reads it is, so that no slot holds it twice;
    one that a training step updates also only where all of it is in the same parts everywhere.
    """
    finder = _Finder(graph, {node.id: node for node in graph.nodes})
    found = {
        position: fusion
        for position, node in enumerate(graph.nodes)
        if (fusion := finder.fusion(node)) is not None
    }
    taken = {graph.nodes[position].id: fusion for position, fusion in found.items()}
    return {
        position: fusion
        for position, fusion in found.items()
        if all(finder.may_take(value, taken) for value in finder.stored(graph.nodes[position]))
    }


@dataclass(slots=True)
class _Finder:
    graph: IRGraph
    nodes: Mapping[int, IRNode]
    bounds: dict[object, BoundDimop | None] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()
    """Values that leave the graph."""

    def __post_init__(self) -> None:
        graph = self.graph
        marked = {v for node in graph.nodes if is_marker(node.op) for v in node.outputs}
        updates = {old: new for old, new in graph.updates.items() if new not in marked}
        self.kept = frozenset((*graph.outputs, *updates, *updates.values()))

    def bound(self, node: IRNode) -> BoundDimop | None:
        """The node's annotation for its shapes, looked up once for equal nodes."""
        key = fingerprint(self.graph, node)
        if key not in self.bounds:
            self.bounds[key] = dimop_of(self.graph, node)
        return self.bounds[key]

    def may_take(self, value: IRValue, taken: Mapping[int, Fusion]) -> bool:
        """Whether a stored value that these products read can be in parts for all its readers."""
        readers = [user for user in value.users if not is_marker(self.nodes[user].op)]
        if not all(user in taken for user in readers):
            return False
        fusions = [taken[user] for user in readers]
        alike = all(fusion.parts == fusions[0].parts for fusion in fusions)
        return len(readers) == len(value.users) or (
            alike and all(map(self._is_read_whole, fusions))
        )

    def _is_read_whole(self, fusion: Fusion) -> bool:
        """Whether the parts are all of the product, and something reads each of them."""
        product = fusion.product
        length = product.bound.length(product.identifier)
        taken = (v for node_id in fusion.takings for v in self.nodes[node_id].outputs)
        return sum(end - start for start, end in fusion.parts) == length and all(
            self.graph.values[value_id].users for value_id in taken
        )

    def stored(self, node: IRNode) -> list[IRValue]:
        """The stored values that a node reads."""
        values = (self.graph.values[value_id] for value_id in node.inputs)
        return [value for value in values if value.is_stored]

    def fusion(self, node: IRNode) -> Fusion | None:
        """The fusion that begins at a node, if any does."""
        stored = self.stored(node)
        matrix = any(len(value.shape) > 1 for value in stored)
        if not matrix or len(node.outputs) != 1 or any(value.id in self.kept for value in stored):
            return None
        bound = self.bound(node)
        for identifier in bound.identifiers if bound is not None else ():
            assert bound is not None
            along = self._columns(node, bound, identifier)
            if along is not None:
                fusion = Fusion(Passing(bound, identifier, Fraction(1)))
                if self._follow(fusion, node.outputs[0], along) and _is_partition(fusion):
                    return fusion
        return None

    def _columns(self, node: IRNode, bound: BoundDimop, identifier: str) -> Along | None:
        """Where an identifier that only stored inputs and the result have runs in the result."""
        flow = bound.flow(identifier)
        for value_id, carry in zip(node.inputs, flow.inputs, strict=True):
            if carry.kind == "partial":
                return None
            if carry.kind == "shard" and not self.graph.values[value_id].is_stored:
                return None
        made = flow.outputs[0]
        if made.kind != "shard" or made.dim is None:
            return None
        return Along(made.dim, Fraction(1, made.unit))

    def _follow(self, fusion: Fusion, value_id: int, along: Along) -> bool:
        """Note what reads the fused value; False where something does not take it apart."""
        way: dict[int, int] = {}
        pending = [(value_id, along)]
        while pending:
            value_id, along = pending.pop()
            value = self.graph.values[value_id]
            if value_id in self.kept or not value.users:
                return False
            for node in (self.nodes[user] for user in value.users):
                taking = self._taking(node, value, along)
                if taking is not None:
                    parts = [_steps(part, along) for part in taking.ranges]
                    if not _add_parts(fusion, node, taking, parts, self._back(node, way)):
                        return False
                    continue
                passed = self._passing(node, along)
                if passed is None:
                    return False
                passing, onward = passed
                fusion.passing[node.id] = (passing, [])
                way[node.outputs[0]] = node.id
                pending.append((node.outputs[0], onward))
        return True

    def _back(self, node: IRNode, way: Mapping[int, int]) -> Iterator[int]:
        """The passing nodes between a node and the product."""
        while node.inputs[0] in way:
            node = self.nodes[way[node.inputs[0]]]
            yield node.id

    def _taking(self, node: IRNode, value: IRValue, along: Along) -> Taking | None:
        """What a node takes along the identifier."""
        if node.op not in TAKINGS:
            return None
        made = [self.graph.values[value_id] for value_id in node.outputs]
        taking = TAKINGS[node.op](node, value, made)
        return taking if taking is not None and taking.dim == along.dim else None

    def _passing(self, node: IRNode, along: Along) -> tuple[Passing, Along] | None:
        """How a node of one tensor passes the identifier on."""
        bound = self.bound(node)
        if bound is None or len(node.inputs) != 1 or len(node.outputs) != 1:
            return None
        for identifier in bound.identifiers:
            flow = bound.flow(identifier)
            read, made = flow.inputs[0], flow.outputs[0]
            if (read.kind, read.dim) == ("shard", along.dim) and made.kind == "shard":
                assert made.dim is not None
                steps = along.steps * read.unit
                return Passing(bound, identifier, steps), Along(made.dim, steps / made.unit)
        return None


def _steps(part: Range, along: Along) -> Range | None:
    """A range of a dimension in steps of the identifier; None where it is no whole number."""
    return _whole(edge * along.steps for edge in part)


def _whole(part: Iterable[Fraction]) -> Range | None:
    """The bounds as integers, None where one is none."""
    start, end = part
    whole = start.denominator == end.denominator == 1
    return (int(start), int(end)) if whole else None


def _add_parts(
    fusion: Fusion,
    node: IRNode,
    taking: Taking,
    parts: Sequence[Range | None],
    between: Iterator[int],
) -> bool:
    """Note the parts that a node takes, on all the way to it; False where one cannot come there."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return False
    fusion.takings[node.id] = (taking, known)
    fusion.parts += [part for part in known if part not in fusion.parts]
    for node_id in between:
        passing, passed = fusion.passing[node_id]
        passed += [part for part in known if part not in passed]
        if any(passing.cut(part) is None for part in known):
            return False
    return True


def _is_partition(fusion: Fusion) -> bool:
    """Whether there are several parts, none of which overlap."""
    fusion.parts.sort()
    apart = all(one[1] <= other[0] for one, other in pairwise(fusion.parts))
    return apart and len(fusion.parts) > 1
