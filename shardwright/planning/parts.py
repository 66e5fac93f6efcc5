"""What a policy sees of a graph: nodes, the ways to split them, and their parts.

In comes a node of an `IRGraph`, which knows nothing of annotations; the catalog says what is known
of it. What always holds: a `SubNode` takes and makes exactly the slices and partial sums that it
names, and the parts of one node together are the node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.errors import AnnotationError, PlanError
from shardwright.ir import IRGraph, IRNode, IRValue
from shardwright.ops.bound import BoundDimop, BoundPart
from shardwright.ops.catalog import dimop_of
from shardwright.ops.dimop import Cut, Slice, even_cuts


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PolicyNode:
    """A node of a graph; ``number`` is its place in execution order."""

    number: int
    node: IRNode
    graph: IRGraph

    def __str__(self) -> str:
        where = f" in {self.scope}" if self.scope else ""
        return f"node {self.number} ({self.name}{where})"

    def __repr__(self) -> str:
        return f"<{self}>"

    @property
    def op(self) -> str:
        """The operator's full name: ``aten.linear.default``."""
        return self.node.op

    @property
    def name(self) -> str:
        """The operator's short name, ``linear``; of a registered one the name it was given."""
        return self.op.split(".")[1] if "." in self.op else self.op

    @property
    def scope(self) -> str:
        """The path of the innermost module around the call, ``""`` for the root."""
        return self.node.scope

    @property
    def inputs(self) -> tuple[IRValue, ...]:
        """What it reads; each value has a name, a shape and a dtype."""
        return tuple(self.graph.values[value_id] for value_id in self.node.inputs)

    @property
    def outputs(self) -> tuple[IRValue, ...]:
        """What it makes."""
        return tuple(self.graph.values[value_id] for value_id in self.node.outputs)

    def algorithm(self, tag: str = "dim") -> Algorithm | None:
        """The ways to split the node by its dimensions, None where there are none.

        ``dim`` is the one tag there is. Raises PlanError for another.
        """
        if tag != "dim":
            raise PlanError(f"{self}: there is no algorithm {tag!r}; there is 'dim'")
        bound = dimop_of(self.graph, self.node)
        return Algorithm(self, bound) if bound is not None and bound.algorithms() else None


class Way(NamedTuple):
    """A way to split a node: by dimension ``dim`` of input ``idx``.

    ``length`` is how many parts there can be at most; ``partial`` whether they make partial sums.
    """

    idx: int
    dim: int
    identifier: str
    length: int
    partial: bool

    def __str__(self) -> str:
        sums = ", partial sums" if self.partial else ""
        return f"idx={self.idx}, dim={self.dim}: {self.identifier}, up to {self.length} parts{sums}"


@dataclass(frozen=True, slots=True, repr=False)
class Algorithm:
    """The ways to split a node by its dimensions; prints as its annotation and a line for each."""

    node: PolicyNode
    bound: BoundDimop

    def __str__(self) -> str:
        return "\n".join([str(self.bound), *(f"  {way}" for way in self.ways())])

    def __repr__(self) -> str:
        return f"<{self.bound} of {self.node}>"

    def ways(self) -> list[Way]:
        """Each way to split; two of them may name the same split, by different inputs."""
        return [self._way(idx, dim) for idx, dim in self.bound.algorithms()]

    def _way(self, idx: int, dim: int) -> Way:
        identifier = self.bound.identifier(idx, dim)
        outputs = self.bound.flow(identifier).outputs
        partial = any(carry.kind == "partial" for carry in outputs)
        return Way(idx, dim, identifier, self.bound.length(identifier), partial)

    def identifier(self, idx: int, dim: int) -> str:
        """What a split of dimension ``dim`` of input ``idx`` splits. Raises AnnotationError."""
        inputs = self.node.inputs
        if not 0 <= idx < len(inputs):
            raise AnnotationError(f"idx={idx} is none of its {len(inputs)} inputs")
        rank = len(inputs[idx].shape)
        if not -rank <= dim < rank:
            raise AnnotationError(f"dim={dim} is none of the {rank} dimensions of input {idx}")
        return self.bound.identifier(idx, dim)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SubNode:
    """A part of a node.

    ``place`` has its number and the number of all parts, a pair for each time the node was split.
    """

    node: PolicyNode
    part: BoundPart
    cuts: Mapping[str, Cut]
    place: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return f"part {', '.join(f'{i} of {num}' for i, num in self.place)} of {self.node}"

    def __repr__(self) -> str:
        return f"<{self}>"

    @property
    def name(self) -> str:
        """As of the node."""
        return self.node.name

    @property
    def inputs(self) -> tuple[Slice | None, ...]:
        """The slice of each input; None where only the dtype is read."""
        return self.part.inputs

    @property
    def outputs(self) -> tuple[Slice | None, ...]:
        """The slice of each output, and which term of a sum it is where it is one."""
        return self.part.outputs

    def algorithm(self, tag: str = "dim") -> Algorithm | None:
        """As of the node: the ways to split the part again."""
        return self.node.algorithm(tag)


Item = PolicyNode | SubNode
"""What can be partitioned and assigned."""


def whole_of(item: Item) -> PolicyNode:
    """The node that an item is, or is a part of."""
    return item.node if isinstance(item, SubNode) else item


def split(item: Item, algo: Algorithm, identifier: str, num: int) -> tuple[SubNode, ...]:
    """An item in ``num`` parts, as even as can be, larger ones first. Raises AnnotationError."""
    before = item.cuts if isinstance(item, SubNode) else {}
    place = item.place if isinstance(item, SubNode) else ()
    if identifier in before:
        pieces = before[identifier].cut(num)
    else:
        pieces = even_cuts(algo.bound.length(identifier), num)
    parts = []
    for index, piece in enumerate(pieces):
        cuts = {**before, identifier: piece}
        parts.append(SubNode(algo.node, algo.bound.part(cuts), cuts, (*place, (index, num))))
    return tuple(parts)
