"""Emitters of what moves or fills memory: copies, casts, constants, concatenation."""

from __future__ import annotations

import math
from typing import Any

from shardwright.ir.tensor_meta import contiguous_strides
from shardwright.kernels.emitting.call import Emission, Emitter, NodeCall, Operand, Table, is_number
from shardwright.kernels.spots import same_order


def _copy(call: NodeCall) -> Emission:
    """A copy in another layout or dtype; the output's own layout says which.

    One that changes neither is the value itself: no value of a graph is ever written to.
    """
    x, made = call.of(0), call.of(call.made[0])
    if "c64" in (x.dtype, made.dtype) or "c128" in (x.dtype, made.dtype) or x.shape != made.shape:
        return None
    if x.dtype == made.dtype and same_order(x.shape, x.strides, made.strides):
        return [call.emit("view", [0], offset=0, shape=x.shape, strides=x.strides)]
    return [call.emit("copy", [0])]


def _reshape(call: NodeCall) -> Emission:
    """A copy in order, seen in another shape."""
    x, made = call.of(0), call.of(call.made[0])
    if made.strides != contiguous_strides(made.shape):
        return None
    copied = call.temp(x.shape, x.dtype)
    copy = call.emit("copy", [0], [copied])
    return [copy, _view(call, copied, call.made[0])]


def _view(call: NodeCall, x: int, y: int) -> Any:
    """The contiguous operand ``x`` in the shape of ``y``."""
    shape = call.of(y).shape
    return call.emit("view", [x], [y], offset=0, shape=shape, strides=contiguous_strides(shape))


def _fill(value: float | None = None, name: str = "fill_value") -> Emitter:
    def emit(call: NodeCall) -> Emission:
        filled = call.arguments[name] if value is None else value
        exact = is_number(filled) and (not isinstance(filled, int) or abs(filled) < 2**53)
        return [call.emit("fill", [], value=float(filled))] if exact else None

    return emit


def _concat(call: NodeCall) -> Emission:
    places = call.arguments["tensors"]
    made = call.of(call.made[0])
    dim = call.arguments["dim"] % max(len(made.shape), 1)
    if not all(_fits(call.of(place), made) for place in places):
        return None
    return [call.emit("concat", places, dim=dim)]


def _fits(x: Operand, made: Operand) -> bool:
    """Whether it has the dtype and the dimensions; torch lets empty vectors into any ``cat``."""
    return x.dtype == made.dtype and len(x.shape) == len(made.shape)


def _stack(call: NodeCall) -> Emission:
    """A concatenation along a new dimension: of views of the tensors with one of size 1 there."""
    places = call.arguments["tensors"]
    made = call.of(call.made[0])
    dim = call.arguments["dim"] % len(made.shape)
    if any(call.of(place).dtype != made.dtype for place in places):
        return None
    emitted, views = [], []
    for place in places:
        x = call.of(place)
        shape = (*x.shape[:dim], 1, *x.shape[dim:])
        strides = (*x.strides[:dim], math.prod(x.shape[dim:]), *x.strides[dim:])
        views.append(call.temp(shape, x.dtype))
        emitted.append(
            call.emit("view", [place], [views[-1]], offset=0, shape=shape, strides=strides)
        )
    return [*emitted, call.emit("concat", views, dim=dim)]


_COPIES = (
    "clone.default",
    "contiguous.default",
    "_to_copy.default",
    "to.dtype",
    "to.device",
    "to.dtype_layout",
    "to.other",
    "type_as.default",
    "lift_fresh_copy.default",
)
_RESHAPES = ("reshape.default", "flatten.using_ints", "reshape_as.default", "unflatten.int")

COPYING: Table = {
    **{f"aten.{name}": _copy for name in _COPIES},
    **{f"aten.{name}": _reshape for name in _RESHAPES},
}
"""For operators that may return their argument, or a view of it: what to do where they do not."""

TABLE: Table = {
    "aten.full.default": _fill(),
    "aten.full_like.default": _fill(),
    "aten.zeros.default": _fill(0.0),
    "aten.zeros_like.default": _fill(0.0),
    "aten.new_zeros.default": _fill(0.0),
    "aten.ones.default": _fill(1.0),
    "aten.ones_like.default": _fill(1.0),
    "aten.new_ones.default": _fill(1.0),
    "aten.new_full.default": _fill(),
    "aten.scalar_tensor.default": _fill(name="s"),
    "aten.fill.Scalar": _fill(name="value"),
    "aten.cat.default": _concat,
    "aten.stack.default": _stack,
}
