"""Where values lie relative to one another, before any memory is chosen.

Comes in: a lowered graph. Goes out: for each value its `Spot`: the root, a value with memory of its
own, and the place in it. What always holds: roots are inputs, stored values and outputs of calls
that are no views; a root's own spot begins at 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from shardwright.errors import ExecError
from shardwright.ir.tensor_meta import contiguous_strides, itemsize
from shardwright.kernels.kinds import BY_NAME, kind_of
from shardwright.kernels.lowered import ABSENT, LoweredGraph, LoweredOp, ValueSpec

VIEW = BY_NAME["view"]


class Spot(NamedTuple):
    """A place in a root's memory; offset and strides in elements."""

    root: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


Spots = Mapping[int, Spot]


def find_spots(values: Mapping[int, ValueSpec], ops: Iterable[LoweredOp]) -> dict[int, Spot]:
    """The spot of every value. Raises ExecError where a call reads what nothing made before."""
    made = {vid for op in ops for vid in op.out_vids}
    spots = {vid: _own(spec) for vid, spec in values.items() if vid not in made}
    for op in ops:
        for vid in op.in_vids:
            if vid != ABSENT and vid not in spots:
                raise ExecError(f"{op.where or kind_of(op.kind_id).name} reads value {vid} early")
        if op.kind_id == VIEW.id:
            spots[op.out_vids[0]] = _viewed(op, spots[op.in_vids[0]])
        else:
            spots.update((vid, _own(values[vid])) for vid in op.out_vids if vid != ABSENT)
    return spots


def _own(spec: ValueSpec) -> Spot:
    return Spot(spec.vid, 0, spec.shape, spec.strides or contiguous_strides(spec.shape))


def _viewed(op: LoweredOp, source: Spot) -> Spot:
    """A view's offset counts from the first element of what it views. Raises ExecError."""
    attrs = VIEW.unpack(op.attr_schema, op.attr_blob)
    shape, strides = tuple(attrs["shape"]), tuple(attrs["strides"])
    if len(shape) != len(strides):
        raise ExecError(
            f"{op.where or VIEW.name}: a view has as many strides as sizes, found the sizes "
            f"{list(shape)} and the strides {list(strides)}; write one stride a dimension"
        )
    return Spot(source.root, source.offset + attrs["offset"], shape, strides)


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements lie from the first to the last, both included."""
    if math.prod(shape) == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def nbytes(spec: ValueSpec) -> int:
    """Bytes of memory that a value of its own takes."""
    strides = spec.strides or contiguous_strides(spec.shape)
    return extent(spec.shape, strides) * itemsize(spec.dtype)


def is_whole(spot: Spot, spec: ValueSpec) -> bool:
    """Whether a spot is all of its root, each element once."""
    count = math.prod(spot.shape)
    strides = spec.strides or contiguous_strides(spec.shape)
    return (
        spot.offset == 0
        and count == math.prod(spec.shape) == extent(spec.shape, strides)
        and count == extent(spot.shape, spot.strides)
    )


def is_inside(spot: Spot, spec: ValueSpec) -> bool:
    """Whether a spot reaches over no end of its root's memory."""
    strides = spec.strides or contiguous_strides(spec.shape)
    end = spot.offset + extent(spot.shape, spot.strides)
    forward = min((spot.offset, *spot.strides), default=0) >= 0
    return math.prod(spot.shape) == 0 or (forward and end <= extent(spec.shape, strides))


def overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements lie on one another: a stride does not step over what smaller ones reach."""
    reach = 0
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def alike(a: Spot, b: Spot) -> bool:
    """Whether two spots order as many elements alike, whatever their roots."""
    return a.shape == b.shape and same_order(a.shape, a.strides, b.strides)


def same_order(shape: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether strides order the elements alike: dimensions of size 1 do not matter."""
    return a == b or all(
        size == 1 or left == right for size, left, right in zip(shape, a, b, strict=True)
    )


def results(graph: LoweredGraph) -> list[int]:
    """What a run leaves: outputs, and new contents of stored values."""
    return [*graph.outputs, *graph.updates.values()]


def saved(ops: Iterable[LoweredOp]) -> list[int]:
    """What calls save: it lies where it lies until a run has ended."""
    return [vid for op in ops for vid in op.saved]
