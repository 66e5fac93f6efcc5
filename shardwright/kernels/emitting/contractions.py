"""Emitters of products of matrices, convolutions, pooling and attention."""

from __future__ import annotations

import math
from typing import Any

from shardwright.kernels.emitting.call import (
    Emission,
    Emitter,
    NodeCall,
    Table,
    is_number,
    is_tensor,
)
from shardwright.kernels.lowered import ABSENT


def _are_floats(call: NodeCall, *places: int | None) -> bool:
    """Whether operands are floats of one dtype."""
    found = {call.of(place).dtype for place in places if place is not None}
    return len(found) == 1 and all(call.of(p).is_float for p in places if p is not None)


def _mm(call: NodeCall) -> Emission:
    return [call.emit("gemm", [0, 1, None, None])] if _are_floats(call, 0, 1) else None


def _bmm(call: NodeCall) -> Emission:
    return [call.emit("bmm", [0, 1])] if _are_floats(call, 0, 1) else None


def _matmul(call: NodeCall) -> Emission:
    a, b = call.of(0).shape, call.of(1).shape
    if len(a) >= 2 and len(b) == 2:
        return _mm(call)
    return _bmm(call) if len(a) == len(b) == 3 and a[0] == b[0] else None


def _linear(call: NodeCall) -> Emission:
    x, w, bias = (call.arguments[name] for name in ("input", "weight", "bias"))
    if len(call.of(x).shape) < 2 or len(call.of(w).shape) != 2 or not _are_floats(call, x, w, bias):
        return None
    if bias is not None and call.of(bias).shape != call.of(w).shape[:1]:
        return None  # one that broadcasts
    return [call.emit("gemm", [x, w, bias, None], transpose_b=1)]


def _addmm(call: NodeCall) -> Emission:
    added, a, b = (call.arguments[name] for name in ("self", "mat1", "mat2"))
    alpha, beta = call.arguments["alpha"], call.arguments["beta"]
    if beta != 1 or not is_number(alpha) or not _are_floats(call, added, a, b):
        return None
    shape, made = call.of(added).shape, call.of(call.made[0]).shape
    if shape == made[-1:]:
        return [call.emit("gemm", [a, b, added, None], alpha=float(alpha))]
    if shape == made:
        return [call.emit("gemm", [a, b, None, added], alpha=float(alpha))]
    return None


def _gemm(call: NodeCall) -> Emission:
    given = call.arguments
    return [
        call.emit(
            "gemm",
            [given["a"], given["b"], given["bias"], given["residual"]],
            transpose_a=int(given["transpose_a"]),
            transpose_b=int(given["transpose_b"]),
            activation=given["activation"],
            alpha=float(given["alpha"]),
        )
    ]


# --- convolutions and pooling ----------------------------------------------------------------


def _pair(value: Any) -> tuple[int, ...]:
    """Two numbers, where one stands for both."""
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    return tuple(items * 2 if len(items) == 1 else items)


def _convolution(call: NodeCall) -> Emission:
    given = call.arguments
    x, w, bias = (given[name] for name in ("input", "weight", "bias"))
    if given.get("transposed") or len(call.of(x).shape) != 4 or not _are_floats(call, x, w, bias):
        return None
    return [call.emit("conv", [x, w, bias, None], **_conv_sizes(given))]


def _conv_sizes(given: dict[str, Any]) -> dict[str, Any]:
    sizes: dict[str, Any] = {key: _pair(given[key]) for key in ("stride", "padding", "dilation")}
    return sizes | {"groups": given["groups"]}


def _fused_conv(call: NodeCall) -> Emission:
    given = call.arguments
    inputs = [given[name] for name in ("x", "w", "bias", "residual")]
    return [call.emit("conv", inputs, activation=given["activation"], **_conv_sizes(given))]


def _max_pool(call: NodeCall) -> Emission:
    given = call.arguments
    if given["ceil_mode"] or _pair(given["dilation"]) != (1, 1) or len(call.of(0).shape) != 4:
        return None
    if not call.of(0).is_float or call.wanted[1:] not in ([], [ABSENT]):
        return None  # of indices that are read
    return _pool(call, mean=0, count_padding=0)


def _average_pool(call: NodeCall) -> Emission:
    given = call.arguments
    if given["ceil_mode"] or given["divisor_override"] is not None or len(call.of(0).shape) != 4:
        return None
    count = int(given["count_include_pad"])
    return _pool(call, mean=1, count_padding=count) if call.of(0).is_float else None


def _pool(call: NodeCall, mean: int, count_padding: int) -> Emission:
    given = call.arguments
    kernel = _pair(given["kernel_size"])
    return [
        call.emit(
            "pool",
            [0],
            call.wanted[:1],
            kernel=kernel,
            stride=_pair(given["stride"]) if given["stride"] else kernel,
            padding=_pair(given["padding"]),
            mean=mean,
            count_padding=count_padding,
        )
    ]


def _adaptive_pool(call: NodeCall) -> Emission:
    """Equal windows without overlap, where the size is a multiple of the output's."""
    x, made = call.of(0), call.of(call.made[0])
    if len(x.shape) != 4 or not x.is_float:
        return None
    pairs = list(zip(x.shape[2:], made.shape[2:], strict=True))
    if any(out == 0 or size % out for size, out in pairs):
        return None
    kernel = tuple(size // out for size, out in pairs)
    return [
        call.emit(
            "pool", [0], kernel=kernel, stride=kernel, padding=(0, 0), mean=1, count_padding=0
        )
    ]


# --- attention -------------------------------------------------------------------------------


def _attention(call: NodeCall) -> Emission:
    given = call.arguments
    q, k, v, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
    if not _is_plain_attention(call) or not is_tensor(q, k, v):
        return None
    outputs = [*call.wanted, -1][:2] if len(call.results) == 1 else call.wanted
    return [call.emit("attention", [q, k, v, mask], outputs, **_scaling(call, q))]


def _attention_backward(call: NodeCall) -> Emission:
    given = call.arguments
    if not _is_plain_attention(call):
        return None
    names = ("grad_out", "query", "key", "value", "out", "logsumexp", "attn_mask")
    inputs = [given[name] for name in names]
    return [call.emit("attention_bwd", inputs, **_scaling(call, given["query"]))]


def _is_plain_attention(call: NodeCall) -> bool:
    """Four dimensions, as many heads in each, no dropout, and a mask that is added, if any."""
    given = call.arguments
    mask = given["attn_mask"]
    places = [given[name] for name in ("query", "key", "value")]
    shapes = [call.of(place).shape for place in places]
    return (
        given["dropout_p"] == 0
        and not given.get("enable_gqa")
        and all(len(shape) == 4 and shape[:2] == shapes[0][:2] for shape in shapes)
        and shapes[1][2] == shapes[2][2]
        and shapes[0][3] == shapes[1][3] == shapes[2][3]
        and _are_floats(call, *places, mask)
        and not (mask is not None and given["is_causal"])
    )


def _scaling(call: NodeCall, q: int) -> dict[str, Any]:
    scale = call.arguments["scale"]
    size = call.of(q).shape[-1]
    return {
        "causal": int(call.arguments["is_causal"]),
        "scale": 1.0 / math.sqrt(size) if scale is None else float(scale),
    }


_convolutions: dict[str, Emitter] = {
    f"aten.{name}": _convolution for name in ("conv2d.default", "convolution.default")
}
_attentions: dict[str, Emitter] = {
    "aten.scaled_dot_product_attention.default": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention_backward,
}

TABLE: Table = {
    "aten.mm.default": _mm,
    "aten.bmm.default": _bmm,
    "aten.matmul.default": _matmul,
    "aten.linear.default": _linear,
    "aten.addmm.default": _addmm,
    "shardwright.gemm.default": _gemm,
    **_convolutions,
    "shardwright.conv.default": _fused_conv,
    "aten.max_pool2d.default": _max_pool,
    "aten.max_pool2d_with_indices.default": _max_pool,
    "aten.avg_pool2d.default": _average_pool,
    "aten.adaptive_avg_pool2d.default": _adaptive_pool,
    "aten._adaptive_avg_pool2d.default": _adaptive_pool,
    **_attentions,
}
