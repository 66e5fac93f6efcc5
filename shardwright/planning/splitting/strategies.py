"""Strategies: every way to do a node on a mesh, and how its tensors then lie.

Comes in: a call's annotation, the sizes of a mesh's axes, and what each axis may do with the call.
Goes out: a `Strategy` for what the axes do together, with the placements in which inputs are read,
outputs made, and gradients of inputs come out of the backward, as `building` writes them
(`axes.Axis`).

What always holds: in a strategy no slot is without a part; placements are in normal form; where two
axes cut one identifier, it falls into equal parts, so that the order of cuts does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import NamedTuple

from shardwright.costs.part import WHOLE, Part
from shardwright.errors import PlanError
from shardwright.ops.bound import BoundDimop
from shardwright.planning.plan import Split, Terms
from shardwright.planning.splitting.axes import NodeAxis, wanted
from shardwright.sharding import Layout, Partial, Replicate, Shard
from shardwright.sharding.layout import cuts, largest_shape, normal_form
from shardwright.sharding.placement import Placements
from shardwright.sharding.ranges import Shape

Choice = Split | Terms | None
"""What one axis of a mesh does with a node."""
Choices = tuple[Choice, ...]
Sizes = tuple[int, ...]
"""Of a mesh's axes."""
NONE: frozenset[int] = frozenset()


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
    whole, kept
        Axes along which the node, and all before it that has a gradient, is done whole, and those
        of them along which its gradients stay terms of a sum.
    """

    splits: Choices
    reads: tuple[Placements | None, ...]
    makes: tuple[Placements, ...]
    returns: tuple[Placements | None, ...]
    part: Part = WHOLE
    whole: frozenset[int] = NONE
    kept: frozenset[int] = NONE

    def mirror(self, index: int) -> Placements:
        """How the gradient of an output is wanted."""
        return mirrored(self.makes[index], self.kept)


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
    kept: frozenset[int] = NONE,
) -> Strategy | None:
    """How a call's tensors lie under these splits; None where it cannot be done so."""
    try:
        return _strategy(bound, shapes, sizes, splits, whole, kept)
    except PlanError:  # a tensor cannot be cut so, or would mix sums with maxima
        return None


def _strategy(
    bound: BoundDimop | None,
    shapes: CallShapes,
    sizes: Sizes,
    splits: Choices,
    whole: frozenset[int],
    kept: frozenset[int],
) -> Strategy:
    work = _parts(bound, sizes, splits)
    axes = [NodeAxis(None, None, "sum") if bound is None else NodeAxis.of(bound, s) for s in splits]
    reads: list[Placements | None] = []
    returns: list[Placements | None] = []
    for index, shape in enumerate(shapes.inputs):
        layout = wanted(axes, index)
        reads.append(None if layout is None else normal(layout.placements, sizes, shape))
        back = tuple(
            Partial() if number in kept else axis.gradient(index)
            for number, axis in enumerate(axes)
        )
        returns.append(None if layout is None else normal(back, sizes, shape))
    makes = [
        normal(tuple(axis.output(index) for axis in axes), sizes, shape)
        for index, shape in enumerate(shapes.outputs)
    ]
    tensors = zip((*reads, *makes), (*shapes.inputs, *shapes.outputs), strict=True)
    held = (shape if layout is None else _held(layout, sizes, shape) for layout, shape in tensors)
    part = Part(work, tuple(held)) if work > 1 else WHOLE
    return Strategy(splits, tuple(reads), tuple(makes), tuple(returns), part, whole, kept)


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


def choices(
    bound: BoundDimop | None, size: int, lengths: Collection[int], terms: Collection[int]
) -> list[Choice]:
    """What an axis of ``size`` slots may do with a call: leave it whole, split it, keep terms.

    ``lengths`` are those that the graph's other calls are cut at, where they do not come out even:
    columns that are ten heads may have to be cut at heads. ``terms`` are the inputs that may come
    as terms of a sum.
    """
    found: list[Choice] = [None]
    if bound is None or size == 1:
        return found
    for identifier in bound.identifiers:
        length = bound.length(identifier)
        found += [Split(identifier, unit) for unit in _units(length, size, lengths)]
    if len(bound.call.outputs) == 1:
        found += [Terms(inputs) for inputs in bound.linear if set(inputs) <= set(terms)]
    return found


def _units(length: int, size: int, lengths: Collection[int]) -> Iterator[int]:
    """Units at whose multiples a length may be cut for ``size`` slots, so that cuts differ."""
    if length >= size:
        yield 1
    for units in lengths:
        if size <= units < length and units % size and length % units == 0:
            yield length // units
