"""What moves, fills or views memory: copies, casts, constants, views, concatenations."""

from __future__ import annotations

import math

import torch

from shardwright.ir.tensor_meta import COMPLEX, TensorMeta
from shardwright.ir.values import Emitted
from shardwright.kernels.attributes import attributes
from shardwright.kernels.row import (
    Emission,
    Emitter,
    KernelCall,
    KernelRow,
    Makes,
    NodeCall,
    is_number,
    need,
)
from shardwright.kernels.torch_kernels import Attrs, Closure, Tensors, present

# --- what calls make; a copy's strides and dtype are the output's, to which x broadcasts ----------


def _copy_makes(call: KernelCall) -> Makes:
    x, y = call["x"], call.said
    whole = len(x.shape) <= len(y.shape) and all(
        size in (1, full) for size, full in zip(reversed(x.shape), reversed(y.shape), strict=False)
    )
    need(whole, f"it copies {x} to {y}", "a shape that broadcasts to the output's")
    alike = x.dtype == y.dtype or not {x.dtype, y.dtype}.intersection(COMPLEX)
    need(alike, f"it copies {x} to {y}", "complex numbers to stay what they are")
    return [[y]]


def _fill_makes(call: KernelCall) -> Makes:
    call.need_fits("value", call.said.dtype)
    return [[call.said]]


def _concat_makes(call: KernelCall) -> Makes:
    tensors = call.present
    need(
        len(tensors) == len(call.inputs) > 0 and len(tensors[0].shape) > 0,
        f"it reads {', '.join(map(str, tensors)) or 'nothing'}",
        "tensors of one dimension or more, none of them absent",
    )
    first = tensors[0]
    dim = call.number("dim", 0, len(first.shape))
    rests = {(x.dtype, len(x.shape), x.shape[:dim], x.shape[dim + 1 :]) for x in tensors}
    need(
        len(rests) == 1,
        f"it reads {', '.join(map(str, tensors))}",
        f"tensors alike in all but the length of dimension {dim}",
    )
    joined = sum(x.shape[dim] for x in tensors)
    return [[TensorMeta((*first.shape[:dim], joined, *first.shape[dim + 1 :]), first.dtype)]]


# --- from operators ------------------------------------------------------------------------------


def identity(call: NodeCall, old: int, new: int) -> Emitted:
    """A value under another name: no value of a graph is ever written to."""
    x = call.of(old)
    if not x.same_order(call.of(new).full_strides):
        return call.emit("copy", [old], [new])
    return call.emit("view", [old], [new], offset=0, shape=x.shape, strides=x.full_strides)


def _copy(call: NodeCall) -> Emission:
    """A copy in another layout or dtype; the output's own layout says which."""
    x, made = call.of(0), call.of(call.made[0])
    if {x.dtype, made.dtype}.intersection(COMPLEX) or x.shape != made.shape:
        return None
    if x.dtype != made.dtype:
        return call.emit("copy", [0])
    return identity(call, 0, call.made[0])


def _reshape(call: NodeCall) -> Emission:
    """A copy in order, seen in another shape."""
    x, made = call.of(0), call.of(call.made[0])
    if made.strides is not None:
        return None
    copied = call.temp(x.shape, x.dtype)
    copy = call.emit("copy", [0], [copied])
    return [
        copy,
        call.emit("view", [copied], offset=0, shape=made.shape, strides=made.full_strides),
    ]


def _fill(value: float | None = None, name: str = "fill_value") -> Emitter:
    def emit(call: NodeCall) -> Emission:
        filled = call.arguments[name] if value is None else value
        exact = is_number(filled) and (not isinstance(filled, int) or abs(filled) < 2**53)
        return call.emit("fill", [], value=float(filled)) if exact else None

    return emit


def _concat(call: NodeCall) -> Emission:
    tensors, dim = call.given("tensors dim")
    return call.emit("concat", tensors, dim=dim % max(len(call.of(call.made[0]).shape), 1))


def _stack(call: NodeCall) -> Emission:
    """A concatenation along a new dimension: of views of the tensors with one of size 1 there."""
    tensors, dim = call.given("tensors dim")
    dim %= len(call.of(call.made[0]).shape)
    emitted, views = [], []
    for place in tensors:
        x = call.of(place)
        shape = (*x.shape[:dim], 1, *x.shape[dim:])
        steps = x.full_strides
        strides = (*steps[:dim], math.prod(x.shape[dim:]), *steps[dim:])
        views.append(call.temp(shape, x.dtype))
        emitted.append(
            call.emit("view", [place], views[-1:], offset=0, shape=shape, strides=strides)
        )
    return [*emitted, call.emit("concat", views, dim=dim)]


# --- torch's kernels -----------------------------------------------------------------------------


def _copy_torch(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    x, y = present((*ins, *outs))
    return lambda: y.copy_(x)


def _fill_torch(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    (y,), value = present(outs), attrs["value"]
    return lambda: y.fill_(value)


def _view_torch(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    return lambda: None


def _concat_torch(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    tensors, (y,), dim = present(ins), present(outs), attrs["dim"]
    return lambda: torch.cat(tensors, dim, out=y)


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

ROWS = (
    KernelRow(
        1,
        "copy",
        "x → y",
        _copy_torch,
        _copy_makes,
        {
            **{f"aten.{name}": _copy for name in _COPIES},
            **{f"aten.{name}": _reshape for name in _RESHAPES},
        },
        elementwise=True,
    ),
    KernelRow(
        2,
        "fill",
        "→ y",
        _fill_torch,
        _fill_makes,
        {
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
        },
        attributes(value=("d", 0.0)),
    ),
    KernelRow(
        3,
        "view",
        "x → y",
        _view_torch,
        None,
        attrs=attributes(offset="q", shape="q*", strides="q*"),
        free=True,
    ),
    KernelRow(
        4,
        "concat",
        "x… → y",
        _concat_torch,
        _concat_makes,
        {"aten.cat.default": _concat, "aten.stack.default": _stack},
        attributes(dim=("i", 0)),
    ),
)
