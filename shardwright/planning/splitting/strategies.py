"""What the axes of a mesh may do with a node: the strategies that a search for splits tries."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from shardwright.ops.bound import BoundDimop
from shardwright.sharding.strategy import Choice, Split, Terms


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
