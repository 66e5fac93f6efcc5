"""Two-dimensional convolutions with their epilogue, and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwright.ir.tensor_meta import TensorMeta
from shardwright.kernels.attributes import attributes
from shardwright.kernels.operators import conv
from shardwright.kernels.row import (
    ABSENT,
    COUNTED,
    Emission,
    KernelCall,
    KernelRow,
    Makes,
    NodeCall,
    need,
)
from shardwright.kernels.torch_kernels import (
    Attrs,
    Closure,
    Tensors,
    bind_operator,
    needed,
    store,
)

_aten = torch.ops.aten

# --- what calls make -----------------------------------------------------------------------------


def _pairs(call: KernelCall, **lowest: int) -> list[tuple[int, int]]:
    """Attributes of two numbers each, from ``lowest`` up."""
    found = []
    for name, low in lowest.items():
        value: Sequence[int] = call.attrs[name]
        fits = len(value) == 2 and min(value) >= low
        need(fits, f"{name}={list(value)}", f"two numbers from {low} up")
        found.append((value[0], value[1]))
    return found


def _windows(
    x: TensorMeta, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[int, int]:
    """How many places a window has, down and across; there is one at least."""
    down, across = (
        (size + 2 * pad - length) // step + 1
        for size, length, step, pad in zip(x.shape[2:], kernel, stride, padding, strict=True)
    )
    need(
        min(down, across) > 0,
        f"windows of {list(kernel)} on x {x} with a padding of {list(padding)}",
        "windows no larger than what they move on",
    )
    return down, across


def _conv_makes(call: KernelCall) -> Makes:
    dtype, x, w = call.float_dtype(), call["x"], call["w"]
    batch, channels, *_ = call.shape_of("x", 4)
    made, each, *kernel = call.shape_of("w", 4)
    stride, padding, dilation = _pairs(call, stride=1, padding=0, dilation=1)
    groups = call.number("groups", 1, COUNTED)
    call.need_activation()
    need(
        channels == each * groups and made % groups == 0 and min(kernel) > 0,
        f"w is {w} and x is {x}, in {groups} groups",
        "w [out, channels of x / groups, height, width], out a multiple of groups",
    )
    spread = [by * (size - 1) + 1 for by, size in zip(dilation, kernel, strict=True)]
    shape = (batch, made, *_windows(x, spread, stride, padding))
    call.need_shape((made,), "bias")
    call.need_shape(shape, "residual")
    return [[TensorMeta(shape, dtype)]]


def _pool_makes(call: KernelCall) -> Makes:
    dtype, x = call.float_dtype(), call["x"]
    batch, channels, *_ = call.shape_of("x", 4)
    kernel, stride, padding = _pairs(call, kernel=1, stride=1, padding=0)
    call.flags("mean", "count_padding")
    within = all(2 * pad <= size for pad, size in zip(padding, kernel, strict=True))
    need(within, f"padding={list(padding)}", f"half the kernel {list(kernel)} at most")
    return [[TensorMeta((batch, channels, *_windows(x, kernel, stride, padding)), dtype)]]


# --- from operators ------------------------------------------------------------------------------


def _pair(value: Any) -> tuple[int, ...]:
    """Two numbers, where one stands for both."""
    items = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return items * 2 if len(items) == 1 else items


def _conv_sizes(call: NodeCall) -> dict[str, Any]:
    names = ("stride", "padding", "dilation")
    return {name: _pair(call.arguments[name]) for name in names} | {
        "groups": call.arguments["groups"]
    }


def _convolution(call: NodeCall) -> Emission:
    if call.arguments.get("transposed"):
        return None
    return call.emit("conv", [*call.given("input weight bias"), None], **_conv_sizes(call))


def _fused_conv(call: NodeCall) -> Emission:
    activation = call.arguments["activation"]
    inputs = call.given("x w bias residual")
    return call.emit("conv", inputs, activation=activation, **_conv_sizes(call))


def _max_pool(call: NodeCall) -> Emission:
    given = call.arguments
    if given["ceil_mode"] or _pair(given["dilation"]) != (1, 1):
        return None
    if call.wanted[1:] not in ([], [ABSENT]):
        return None  # of indices that are read
    return _pool(call, mean=0, count_padding=0)


def _average_pool(call: NodeCall) -> Emission:
    given = call.arguments
    if given["ceil_mode"] or given["divisor_override"] is not None:
        return None
    return _pool(call, mean=1, count_padding=int(given["count_include_pad"]))


def _pool(call: NodeCall, mean: int, count_padding: int) -> Emission:
    given = call.arguments
    kernel = _pair(given["kernel_size"])
    return call.emit(
        "pool",
        [0],
        call.wanted[:1],
        kernel=kernel,
        stride=_pair(given["stride"]) if given["stride"] else kernel,
        padding=_pair(given["padding"]),
        mean=mean,
        count_padding=count_padding,
    )


def _adaptive_pool(call: NodeCall) -> Emission:
    """Equal windows without overlap, where the size is a multiple of the output's."""
    pairs = list(zip(call.of(0).shape[-2:], call.of(call.made[0]).shape[-2:], strict=True))
    if any(out == 0 or size % out for size, out in pairs):
        return None
    kernel = tuple(size // out for size, out in pairs)
    sizes = {"kernel": kernel, "stride": kernel, "padding": (0, 0)}
    return call.emit("pool", [0], **sizes, mean=1, count_padding=0)


# --- torch's kernels -----------------------------------------------------------------------------


def _conv_torch(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    (x, w), (bias, residual) = needed(*ins[:2]), ins[2:]
    stride, padding, dilation = (attrs[name] for name in ("stride", "padding", "dilation"))
    rest = attrs["groups"], attrs["activation"]
    return lambda: store(conv(x, w, bias, residual, stride, padding, dilation, *rest), outs)


def _pool_torch(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    args = [*ins, *(list(attrs[name]) for name in ("kernel", "stride", "padding"))]
    if attrs["mean"]:
        counted = bool(attrs["count_padding"])
        return bind_operator(_aten.avg_pool2d.default, [*args, False, counted], {}, outs)
    return bind_operator(_aten.max_pool2d_with_indices.default, args, {}, outs)


ROWS = (
    # Channels may lie last; the weight is [out, in / groups, kh, kw].
    KernelRow(
        36,
        "conv",
        "x [b, c, h, w], w, bias?, residual? → y",
        _conv_torch,
        _conv_makes,
        {
            "aten.conv2d.default": _convolution,
            "aten.convolution.default": _convolution,
            "shardwright.conv.default": _fused_conv,
        },
        attributes(
            stride=("q*", (1, 1)),
            padding=("q*", (0, 0)),
            dilation=("q*", (1, 1)),
            groups=("q", 1),
            activation=("B", 0),
        ),
        pairs=((0, 3),),
    ),
    KernelRow(
        37,
        "pool",
        "x [b, c, h, w] → y",
        _pool_torch,
        _pool_makes,
        {
            "aten.max_pool2d.default": _max_pool,
            "aten.max_pool2d_with_indices.default": _max_pool,
            "aten.avg_pool2d.default": _average_pool,
            "aten.adaptive_avg_pool2d.default": _adaptive_pool,
            "aten._adaptive_avg_pool2d.default": _adaptive_pool,
        },
        attributes(kernel="q*", stride="q*", padding="q*", mean="B", count_padding="B"),
    ),
)
