"""The built-in ways to split along a mesh axis: data, tensor, sequence.

Each says where `follow` begins.

data
    The batch: the first dimension of inputs.
tensor
    Megatron's: an operator with a stored table or matrix is split by the dimension that only the
    stored tensor and the result have (the columns), and where its other input comes split, by that
    (the rows), which gives a partial sum. Lookups in large tables are split by vocabulary.
sequence
    As tensor, and where a partial sum is read it is scattered along the sequence, so that norms and
    elementwise operators between the layers are split too.

Columns that what reads them cannot take as they are would be gathered at once. They are split only
where that takes a good part of the stored bytes off every slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from shardwright.errors import PlanError
from shardwright.ir import IRGraph, IRNode
from shardwright.ops.bound import BoundDimop, Carry
from shardwright.ops.catalog import dimop_of
from shardwright.ops.independence import Annotations, identifier_at
from shardwright.planning.follow import (
    Seed,
    Sharded,
    SplitPropagation,
    follow,
)
from shardwright.planning.fusions import Fusion, find_fusions
from shardwright.planning.plan import Split, Terms
from shardwright.planning.step_graph import forward_view
from shardwright.planning.unfuse import unfuse
from shardwright.tracing.dropout import RNG

# --- the batch ------------------------------------------------------------------------------------
#
# The batch is the first dimension of the inputs that a microbatch has its part of. Where nothing
# says which these are, it is that of most inputs: their most frequent first size, of several
# equally frequent ones the largest. The count that dropout draws from has one a microbatch. An
# output has it where dimension annotations lead there from an input.


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


# --- tensor, sequence -----------------------------------------------------------------------------


LARGE_TABLE = 4
"""A lookup is split by vocabulary where its table has this many times the bytes of its result,"""
TABLE_SHARE = 0.05
"""or this share of all stored bytes."""
WHOLE_SHARE = 0.05
"""Columns that are gathered at once are split where else this share more of all stored bytes would
be on every slot."""


def data(graph: IRGraph, size: int, annotations: Annotations | None = None) -> SplitPropagation:
    """Split by batch."""
    return follow_batch(graph, size, annotations)


def tensor(graph: IRGraph, size: int, annotations: Annotations | None = None) -> SplitPropagation:
    """Split by columns, then rows."""
    known = annotations or Annotations(graph)
    return _sparing(
        lambda columns: follow(
            graph, size, eager=[_rows], seeds=[_vocabulary, columns], annotations=known
        )
    )


def sequence(graph: IRGraph, size: int, annotations: Annotations | None = None) -> SplitPropagation:
    """Split by columns, then rows, and by sequence between."""
    known = annotations or Annotations(graph)
    return _sparing(
        lambda columns: follow(
            graph,
            size,
            eager=[_rows, _vocabulary, columns],
            scatters=[_along_sequence],
            annotations=known,
        )
    )


def _sparing(split: Callable[[Seed], SplitPropagation]) -> SplitPropagation:
    """Without columns that are gathered at once, where that leaves little more on every slot."""
    spared = split(_columns_that_lead_on)
    allowed = WHOLE_SHARE * spared.stored_bytes
    if spared.whole_bytes() <= allowed:
        return spared
    all_split = split(_columns)
    return all_split if spared.whole_bytes() - all_split.whole_bytes() > allowed else spared


class Splitter(Protocol):
    """Splits a graph along an axis of so many slots."""

    def __call__(
        self, graph: IRGraph, size: int, annotations: Annotations | None = None
    ) -> SplitPropagation:
        """Split it; ``annotations`` are the graph's, where they are known."""


SPLITTERS: dict[str, Splitter] = {
    "data": data,
    "tensor": tensor,
    "sequence": sequence,
}
"""By the name of a mesh axis or a policy."""
UNFUSING_AXES = frozenset({"tensor", "sequence"})
"""Axes for which fused products are unfused: those that split columns."""


@dataclass
class UnfusedProducts:
    """Which fused products of a graph are unfused for which axes; `over` says it.

    What does not depend on the axes is worked out once.
    """

    graph: IRGraph
    _annotations: Annotations | None = None
    """Of the forward with all of them unfused."""
    _made: dict[tuple[int, ...], IRGraph] = field(default_factory=dict)
    """By the positions of those that are unfused."""
    _kept: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    """By axis and size."""

    @cached_property
    def fusions(self) -> Mapping[int, Fusion]:
        """The fused products, by position."""
        return find_fusions(self.graph)

    def over(self, axes: Mapping[str, int]) -> tuple[IRGraph, tuple[int, ...]]:
        """The graph with those unfused of which such an axis splits parts, by columns.

        Also their positions in the graph. Parts split by what they sum over would be reduced one by
        one: those products stay fused.
        """
        axis = next((name for name in axes if name in UNFUSING_AXES and axes[name] > 1), None)
        kept = self._split_by_columns(axis, axes[axis]) if axis and self.fusions else ()
        return self._apart(kept), kept

    def _apart(self, positions: tuple[int, ...]) -> IRGraph:
        if positions not in self._made:
            self._made[positions] = unfuse(self.graph, positions, self.fusions)
        return self._made[positions]

    def _split_by_columns(self, axis: str, size: int) -> tuple[int, ...]:
        """The positions of products all of whose parts are split by columns."""
        if (axis, size) not in self._kept:
            if self._annotations is None:
                apart = self._apart(tuple(self.fusions))
                self._annotations = Annotations(forward_view(apart))
            following = SPLITTERS[axis](self._annotations.graph, size, self._annotations)
            self._kept[axis, size] = self._in_columns(following)
        return self._kept[axis, size]

    def _in_columns(self, following: SplitPropagation) -> tuple[int, ...]:
        """As `_split_by_columns`, from what an axis does with the graph of all parts."""
        view = following.graph
        names: dict[bool, set[str]] = {True: set(), False: set()}
        for node in view.nodes:
            if node.id in following.chosen:
                columns = following.makes_shards(node)
                names[columns].update(name for v in node.inputs for name in view.values[v].names)
        good = names[True] - names[False]
        stored, nodes = self.graph.values, self.graph.nodes
        return tuple(
            position
            for position in self.fusions
            if any(good.intersection(stored[v].names) for v in nodes[position].inputs)
        )


def take_apart(graph: IRGraph, axes: Mapping[str, int]) -> tuple[IRGraph, tuple[int, ...]]:
    """The graph with fused products unfused for these axes, as `UnfusedProducts` has it."""
    return UnfusedProducts(graph).over(axes)


def _columns(following: SplitPropagation, node: IRNode, bound: BoundDimop) -> str | None:
    """What only a stored matrix and the result have."""
    return max(_fitting_columns(following, node, bound), default=(0, None))[1]


def _columns_that_lead_on(
    following: SplitPropagation, node: IRNode, bound: BoundDimop
) -> str | None:
    """Of the columns those that can be read as they are."""
    found = (
        (stored, identifier)
        for stored, identifier in _fitting_columns(following, node, bound)
        if following.leads_on(node, bound, identifier)
    )
    return max(found, default=(0, None))[1]


def _fitting_columns(
    following: SplitPropagation, node: IRNode, bound: BoundDimop
) -> Iterator[tuple[int, str]]:
    """The bytes that are split by each identifier of stored matrices and the result alone."""
    for identifier, partial in _stored_alone(following, node, bound):
        if not partial:
            yield _split_bytes(following, node, bound.flow(identifier).inputs), identifier


def _vocabulary(following: SplitPropagation, node: IRNode, bound: BoundDimop) -> str | None:
    """The rows of a table in which a node looks up, where it is worth it."""
    for identifier, partial in _stored_alone(following, node, bound):
        if partial:
            table = _split_bytes(following, node, bound.flow(identifier).inputs)
            made = sum(following.value(v).nbytes for v in node.outputs)
            large = table > LARGE_TABLE * made or table > TABLE_SHARE * following.stored_bytes
            if large or _is_tied(following, node, bound, identifier):
                return identifier
    return None


def _stored_alone(
    following: SplitPropagation, node: IRNode, bound: BoundDimop
) -> Iterator[tuple[str, bool]]:
    """What stored matrices have and no other input, and whether its split makes partial sums.

    Where there is a vocabulary to split by, nothing else is: columns of a lookup cut the model's
    width, of which the next norm needs all.
    """
    if not any(len(following.value(v).shape) > 1 for v in node.inputs if following.is_weight(v)):
        return
    found: list[tuple[str, bool]] = []
    for identifier in bound.identifiers:
        flow = bound.flow(identifier)
        shards = [
            v for v, carry in zip(node.inputs, flow.inputs, strict=True) if carry.kind == "shard"
        ]
        if shards and all(map(following.is_weight, shards)):
            partial = any(carry.kind == "partial" for carry in flow.outputs)
            found.append((identifier, partial))
    tables = [item for item in found if item[1]]
    for identifier, partial in tables or found:
        if following.fits(node, bound, identifier):
            yield identifier, partial


def _split_bytes(following: SplitPropagation, node: IRNode, carries: Sequence[Carry]) -> int:
    """Bytes of a node's weights that are split."""
    return sum(
        following.value(v).nbytes
        for v, carry in zip(node.inputs, carries, strict=True)
        if carry.kind == "shard" and following.is_weight(v)
    )


def _is_tied(following: SplitPropagation, node: IRNode, bound: BoundDimop, identifier: str) -> bool:
    """Whether another node has as its columns what is a table's vocabulary here."""
    for table, carry in zip(node.inputs, bound.flow(identifier).inputs, strict=True):
        for reader in (following.nodes[user] for user in following.value(table).users):
            there = following.bound(reader)
            if carry.kind != "shard" or reader.op == node.op or there is None:
                continue
            at = reader.inputs.index(table)
            for column, partial in _stored_alone(following, reader, there):
                read = there.flow(column).inputs[at]
                if not partial and (read.kind, read.dim) == ("shard", carry.dim):
                    return True
    return False


def _rows(following: SplitPropagation, node: IRNode, bound: BoundDimop) -> str | None:
    """The split of a stored matrix's rows, where the other input comes split that way."""
    if not any(map(following.is_weight, node.inputs)):
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
            carry.kind == "shard" and following.is_weight(v) and len(following.value(v).shape) > 1
            for v, carry in zip(node.inputs, flow.inputs, strict=True)
        )
        if cuts_stored:
            return identifier
    return None


def _along_sequence(following: SplitPropagation, node: IRNode, bound: BoundDimop) -> str | None:
    """The sequence dimension of a partial sum: the last but one that can be split."""
    for i, value_id in enumerate(node.inputs):
        if isinstance(following.state(value_id), str):
            rank = len(following.value(value_id).shape)
            for dim in reversed(range(rank - 1)):
                identifier = identifier_at(bound, i, dim)
                if identifier is not None and following.fits(node, bound, identifier):
                    return identifier
    return None


# --- all axes of a mesh ---------------------------------------------------------------------------
#
# Along each axis but ``pipeline`` the whole graph is split by itself; a node gets what each axis
# gives it. Where two axes would cut one identifier finer than its units allow, the inner axis
# leaves the node whole.


PIPELINE, DATA = "pipeline", "data"
AXES = (PIPELINE, *SPLITTERS)
_SPLIT_BY = {
    DATA: ("the batch, the first dimension of inputs", "use fewer slots, or a larger batch"),
    "tensor": (
        "products with weights, and lookups, by columns, rows, heads and vocabulary",
        "use fewer slots, or another axis",
    ),
    "sequence": (
        "products with weights, and the sequence between them",
        "use fewer slots, or another axis",
    ),
}
"""What an axis splits, and what to do where a graph has none that is long enough."""


def split_nodes(
    graph: IRGraph, axes: Mapping[str, int]
) -> tuple[list[tuple[Split | Terms | None, ...]], list[str]]:
    """What each axis but ``pipeline`` splits of each node, and notes. Raises PlanError."""
    if unknown := [axis for axis in axes if axis not in AXES]:
        raise PlanError(f"unknown mesh axis {unknown[0]!r}; known are {', '.join(AXES)}")
    inner = [axis for axis in axes if axis != PIPELINE]
    found = [_split(graph, axis, axes[axis]) for axis in inner]
    sizes = [axes[axis] for axis in inner]
    splits = [
        compatible(graph, node, sizes, [column[i] for column in found])
        for i, node in enumerate(graph.nodes)
    ]
    return splits, whole_notes(graph, splits)


def _split(graph: IRGraph, axis: str, size: int) -> list[Split | Terms | None]:
    """The split of each node along an axis. Raises PlanError where there is none at all."""
    splits = SPLITTERS[axis](graph, size).splits()
    if size > 1 and not any(splits):
        parts, advice = _SPLIT_BY[axis]
        raise PlanError(
            f"nothing in the graph {graph.name!r} can be split in {size} along the mesh axis "
            f"{axis!r}, which splits {parts}: there is nothing of the kind, or it is too short or "
            f"read by what cannot take a part; {advice}"
        )
    return splits


def compatible(
    graph: IRGraph, node: IRNode, sizes: Sequence[int], splits: Sequence[Split | Terms | None]
) -> tuple[Split | Terms | None, ...]:
    """The splits of all axes, without those that would leave a slot without a unit."""
    parts: dict[str, int] = {}
    kept: list[Split | Terms | None] = []
    for split, size in zip(splits, sizes, strict=True):
        if isinstance(split, Split) and split.identifier in parts:
            bound = dimop_of(graph, node)
            assert bound is not None
            fine = bound.length(split.identifier) % (parts[split.identifier] * size * split.unit)
            split = None if fine else split
        if isinstance(split, Split):
            parts[split.identifier] = parts.get(split.identifier, 1) * size
        kept.append(split)
    return tuple(kept)


def whole_notes(graph: IRGraph, splits: Sequence[tuple[Split | Terms | None, ...]]) -> list[str]:
    """Which operators every slot computes for want of an annotation."""
    whole = {
        node.op
        for node, found in zip(graph.nodes, splits, strict=True)
        if found and not any(found) and dimop_of(graph, node) is None
    }
    if not whole:
        return []
    return [f"without an annotation, so done whole by every slot: {', '.join(sorted(whole))}"]
