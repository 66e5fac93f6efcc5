"""Arithmetic of strides, in elements: extents, overlaps, orders, and those that torch chooses.

`result_strides` are those that torch gives the result of an elementwise operator on several
tensors: inputs of one dense layout pass it on; else dimensions are sorted by the strides of the
first input that tells them apart (`TensorIteratorBase::reorder_dimensions` of ATen).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwright.ir.tensor_meta import is_dense

Strides = Sequence[int]


def extent(shape: Sequence[int], strides: Strides) -> int:
    """How many elements lie from the first to the last, both included."""
    if math.prod(shape) == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def same_order(shape: Sequence[int], a: Strides, b: Strides) -> bool:
    """Whether strides order the elements alike: dimensions of size 1 do not matter."""
    return a == b or all(
        size == 1 or left == right for size, left, right in zip(shape, a, b, strict=True)
    )


Shaped = tuple[Sequence[int], Sequence[int]]
"""A shape and strides in elements."""


def result_strides(shape: Sequence[int], inputs: Sequence[Shaped]) -> tuple[int, ...]:
    """Strides of the result of this shape."""
    if all(tuple(size) == tuple(shape) for size, _ in inputs):
        layouts = {tuple(strides) for _, strides in inputs}
        if len(layouts) == 1 and is_dense(shape, (only := layouts.pop())):
            return only
    order = _order(shape, [_broadcast_strides(shape, given) for given in inputs])
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def _broadcast_strides(shape: Sequence[int], given: Shaped) -> list[int]:
    """The strides with which an input is read as one of ``shape``."""
    sizes, strides = given
    lead = len(shape) - len(sizes)
    seen = zip(sizes, strides, shape[lead:], strict=True)
    return [0] * lead + [0 if size == 1 and full != 1 else step for size, step, full in seen]


def _order(shape: Sequence[int], inputs: Sequence[Sequence[int]]) -> list[int]:
    """Dimensions from the fastest to the slowest, sorted by insertion as ATen does."""
    order = list(reversed(range(len(shape))))
    for i in range(1, len(order)):
        at = i
        for before in range(i - 1, -1, -1):
            slower = _compare(shape, inputs, order[before], order[at])
            if slower > 0:
                order[before], order[at] = order[at], order[before]
                at = before
            elif slower < 0:
                break
    return order


def _compare(shape: Sequence[int], inputs: Sequence[Sequence[int]], a: int, b: int) -> int:
    """Above 0 where dimension ``a`` is slower than ``b``, below where faster, 0 where open."""
    for strides in inputs:
        if strides[a] == 0 or strides[b] == 0:
            continue
        if strides[a] != strides[b]:
            return 1 if strides[a] > strides[b] else -1
        if shape[a] > shape[b]:
            return 1
    return 0
