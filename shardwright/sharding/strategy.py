"""Strategies: what the axes of a mesh do with a node, and how its tensors then lie.

A `Split` cuts an identifier of the node's annotation along one axis; `Terms` lets the node go on
with terms of a sum; None leaves it whole. `NodeAxis` gives the placements that follow along one
axis, `strategy` those that follow from all axes together: in which layout each input is read, each
output made, and the gradient of each input comes out of the node's backward. Planning, building and
costs all ask here: what is planned and priced is what is written.

In a strategy no slot is without a part and placements are in normal form; where two axes cut one
identifier, it falls into equal parts, so that the order of cuts does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import msgspec

from shardwright.errors import PlanError
from shardwright.ir import IRGraph, IRNode
from shardwright.ops.bound import BoundDimop, Carry, Flow
from shardwright.sharding.layout import (
    Layout,
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    cuts,
    largest_shape,
    normal_form,
)
from shardwright.sharding.ranges import Shape


class Split(msgspec.Struct, frozen=True, tag="split", forbid_unknown_fields=True):
    """What a mesh axis splits: an identifier of the operator's annotation.

    The parts are multiples of ``unit`` values, as even as can be, larger ones first.
    """

    identifier: str
    unit: int = 1


class Terms(msgspec.Struct, frozen=True, tag="terms", forbid_unknown_fields=True):
    """What a mesh axis does not split but may keep as terms of a sum.

    Where the inputs at these positions lie as partial sums along the axis, each slot does all of
    the node on its terms, and what it makes are terms too: the sum is done behind it. The operator
    must be linear in these inputs. Where they do not, the node is done whole.
    """

    inputs: tuple[int, ...]


Choice = Split | Terms | None
"""What one axis of a mesh does with a node."""
Choices = tuple[Choice, ...]
Sizes = tuple[int, ...]
"""Of a mesh's axes."""
NONE: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class NodeAxis:
    """How a node's tensors lie along one axis of its mesh."""

    split: Split | Terms | None
    flow: Flow | None
    reduction: str

    @classmethod
    def of(cls, bound: BoundDimop, split: Split | Terms | None) -> NodeAxis:
        """What a split of a call means for its tensors."""
        flow = bound.flow(split.identifier) if isinstance(split, Split) else None
        return cls(split, flow, bound.reduction)

    def adds(self, index: int) -> bool:
        """Whether an input is a term that is added to what the parts make: by the first only."""
        return self.flow is not None and self.flow.inputs[index].kind == "partial"

    def ignores(self, index: int) -> bool:
        """Whether only the dtype of an input is read."""
        return self.flow is not None and self.flow.inputs[index].kind == "any"

    def input(self, index: int) -> Placement:
        """How an input is read: a term to add comes whole."""
        if isinstance(self.split, Terms):
            return Partial() if index in self.split.inputs else Replicate()
        if self.flow is None or self.adds(index):
            return Replicate()
        return self._placement(self.flow.inputs[index])

    def output(self, index: int) -> Placement:
        """How an output is made."""
        if isinstance(self.split, Terms):
            return Partial()
        return Replicate() if self.flow is None else self._placement(self.flow.outputs[index])

    def gradient(self, index: int) -> Placement:
        """How the gradient of an input is made, from gradients that lie as `mirror` says.

        What each slot makes is all of it where all slots do the same, and where the input is a
        term: then the gradient of the sum is that of each term. Of an input that the split does not
        touch, each slot makes the part that goes through what it computes.
        """
        if self.split is None:
            return Replicate()
        if isinstance(self.split, Terms):
            return Replicate() if index in self.split.inputs else Partial()
        assert self.flow is not None
        carry = self.flow.inputs[index]
        return self._placement(carry) if carry.kind == "shard" else Partial()

    def repeats(self, index: int) -> bool:
        """Whether all slots make the same output although the node is split."""
        return self.flow is not None and self.flow.outputs[index].kind == "whole"

    def _placement(self, carry: Carry) -> Placement:
        if carry.kind in ("whole", "any"):
            return Replicate()
        if carry.kind == "partial":
            return Partial(self.reduction)
        assert carry.dim is not None
        assert isinstance(self.split, Split)
        return Shard(carry.dim, carry.unit * self.split.unit)


def wanted(axes: Sequence[NodeAxis], index: int) -> Layout | None:
    """The layout to fetch an input in, None where only the dtype is read."""
    if any(axis.ignores(index) for axis in axes):
        return None
    return Layout(tuple(axis.input(index) for axis in axes))


# --- all axes together ---------------------------------------------------------------------------


class LargestPart(NamedTuple):
    """The largest part of a node's work.

    work
        How many times it goes into all of the work.
    shapes
        Those of what a slot has of each input, then of each output; none where it has all of them.
    """

    work: float = 1.0
    shapes: tuple[Shape, ...] = ()

    def shapes_of(self, graph: IRGraph, node: IRNode) -> Mapping[int, Shape]:
        """The shape of what a slot has of each value; of one read twice the larger piece."""
        values = (*node.inputs, *node.outputs)
        if not self.shapes:
            return {value_id: graph.values[value_id].shape for value_id in values}
        found: dict[int, Shape] = {}
        for value_id, shape in zip(values, self.shapes, strict=True):
            found[value_id] = max(shape, found.get(value_id, shape), key=math.prod)
        return found


WHOLE = LargestPart()


class CallShapes(NamedTuple):
    """The shapes of a call's inputs and outputs."""

    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]


class Strategy(NamedTuple):
    """One way to do a node.

    splits
        What each axis does.
    reads, returns
        How each input is read, and how its gradient is made; None where only the dtype is read.
    makes
        How each output is made.
    part
        The largest part of the node's work, with what its slot has of the node's tensors.
    whole
        Axes along which the node, and all before it that has a gradient, is done whole.
    """

    splits: Choices
    reads: tuple[Placements | None, ...]
    makes: tuple[Placements, ...]
    returns: tuple[Placements | None, ...]
    part: LargestPart = WHOLE
    whole: frozenset[int] = NONE


def mirrored(made: Placements, kept: Collection[int] = NONE) -> Placements:
    """How the gradient of a value lies that is made so: that of a sum is that of each term."""
    return tuple(
        Partial()
        if axis in kept
        else (Replicate() if isinstance(placement, Partial) else placement)
        for axis, placement in enumerate(made)
    )


def strategy(
    bound: BoundDimop | None,
    shapes: CallShapes,
    sizes: Sizes,
    splits: Choices,
    whole: frozenset[int] = NONE,
) -> Strategy | None:
    """How a call's tensors lie under these splits; None where it cannot be done so."""
    try:
        return _strategy(bound, shapes, sizes, splits, whole)
    except PlanError:  # a tensor cannot be cut so, or would mix sums with maxima
        return None


def _strategy(
    bound: BoundDimop | None,
    shapes: CallShapes,
    sizes: Sizes,
    splits: Choices,
    whole: frozenset[int],
) -> Strategy:
    work = _parts(bound, sizes, splits)
    axes = [NodeAxis(None, None, "sum") if bound is None else NodeAxis.of(bound, s) for s in splits]
    reads: list[Placements | None] = []
    returns: list[Placements | None] = []
    for index, shape in enumerate(shapes.inputs):
        layout = wanted(axes, index)
        reads.append(None if layout is None else normal(layout.placements, sizes, shape))
        back = tuple(axis.gradient(index) for axis in axes)
        returns.append(None if layout is None else normal(back, sizes, shape))
    makes = [
        normal(tuple(axis.output(index) for axis in axes), sizes, shape)
        for index, shape in enumerate(shapes.outputs)
    ]
    tensors = zip((*reads, *makes), (*shapes.inputs, *shapes.outputs), strict=True)
    held = (shape if layout is None else _held(layout, sizes, shape) for layout, shape in tensors)
    part = LargestPart(work, tuple(held)) if work > 1 else WHOLE
    return Strategy(splits, tuple(reads), tuple(makes), tuple(returns), part, whole)


@lru_cache(maxsize=1 << 16)
def _held(placements: Placements, sizes: Sizes, shape: Shape) -> Shape:
    """The shape of the most that a slot holds of a tensor."""
    return largest_shape(placements, sizes, shape)


@lru_cache(maxsize=1 << 16)
def normal(placements: Placements, sizes: Sizes, shape: Shape) -> Placements:
    """The normal form of a layout. Raises PlanError where the tensor cannot have it."""
    Layout(placements)  # refuses reductions whose order matters
    for placement in placements:
        if isinstance(placement, Shard) and placement.dim >= len(shape):
            raise PlanError(f"{placement} is of no tensor of shape {list(shape)}")
    if not all(cut.fits for cut in cuts(placements, sizes, shape)):
        raise PlanError(f"{Layout(placements)} does not cut {list(shape)} at its units")
    return normal_form(placements, sizes, shape)


def _parts(bound: BoundDimop | None, sizes: Sizes, splits: Choices) -> float:
    """How many parts as large as the largest the work has. Raises PlanError where one is empty."""
    largest: dict[str, int] = {}
    units: dict[str, int] = {}
    ways: dict[str, int] = {}
    for size, split in zip(sizes, splits, strict=True):
        if not isinstance(split, Split) or size == 1:
            continue
        name = split.identifier
        if bound is None or name not in bound.identifiers:
            raise PlanError(f"there is no {name!r} to split")
        units[name] = bound.length(name) // split.unit
        outer, ways[name] = ways.get(name, 1), ways.get(name, 1) * size
        if units[name] < size or (outer > 1 and units[name] % ways[name]):
            raise PlanError(f"{name!r} cannot be cut in {ways[name]}")
        largest[name] = math.ceil(largest.get(name, units[name]) / size)
    return math.prod(units[name] / most for name, most in largest.items())
