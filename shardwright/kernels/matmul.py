"""Products of matrices, with their epilogue: ``gemm`` and ``bmm``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from shardwright.ir.tensor_meta import TensorMeta
from shardwright.kernels.attributes import attributes
from shardwright.kernels.operators import gemm
from shardwright.kernels.row import (
    ACTIVATIONS,
    Emission,
    KernelCall,
    KernelRow,
    Makes,
    NodeCall,
    emits,
    is_number,
    need,
)
from shardwright.kernels.torch_kernels import Attrs, Closure, Tensors, needed, present, rows_of

_aten = torch.ops.aten

# --- what calls make -----------------------------------------------------------------------------


def _gemm_makes(call: KernelCall) -> Makes:
    dtype, a, (rows, columns) = call.float_dtype(), call["a"], call.shape_of("b", 2)
    turned_a, turned_b = call.flags("transpose_a", "transpose_b")
    call.need_activation()
    call.need_fits("alpha", "f64" if dtype == "f64" else "f32")
    if turned_a or len(a.shape) < 2:
        call.shape_of("a", 2)
    leading, k = (a.shape[1:], a.shape[0]) if turned_a else (a.shape[:-1], a.shape[-1])
    inner, n = (columns, rows) if turned_b else (rows, columns)
    need(k == inner, f"a is {a} and b is {call['b']}", "as many columns of a as rows of b")
    call.need_shape((n,), "bias")
    call.need_shape((*leading, n), "residual")
    return [[TensorMeta((*leading, n), dtype)]]


def _bmm_makes(call: KernelCall) -> Makes:
    dtype, a, b = call.float_dtype(), call.shape_of("a", 3), call.shape_of("b", 3)
    need(
        (a[0], a[2]) == b[:2],
        f"a is {call['a']} and b is {call['b']}",
        "as many matrices, and as many columns of a's as rows of b's",
    )
    return [[TensorMeta((*a[:2], b[2]), dtype)]]


# --- from operators ------------------------------------------------------------------------------


def _matmul(call: NodeCall) -> Emission:
    return (
        call.emit("gemm", [0, 1, None, None])
        if len(call.of(1).shape) == 2
        else call.emit("bmm", [0, 1])
    )


def _addmm(call: NodeCall) -> Emission:
    added, a, b, alpha, beta = call.given("self mat1 mat2 alpha beta")
    if beta != 1 or not is_number(alpha):
        return None
    is_bias = call.of(added).shape == call.of(call.made[0]).shape[-1:]
    return call.emit("gemm", [a, b, *((added, None) if is_bias else (None, added))], alpha=alpha)


# --- torch's kernels -----------------------------------------------------------------------------

_ACTIVATE: Mapping[str, Callable[[torch.Tensor], object]] = {
    "none": lambda y: y,
    "relu": torch.relu_,
    "gelu": lambda y: _aten.gelu.out(y, out=y),
    "gelu_tanh": lambda y: _aten.gelu.out(y, approximate="tanh", out=y),
    "silu": lambda y: _aten.silu.out(y, out=y),
    "tanh": torch.tanh_,
    "sigmoid": torch.sigmoid_,
}
"""Activations in place."""


def _gemm_torch(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    """By ``addmm`` with the one summand that there is; other forms by the operator itself."""
    *_, bias, residual = ins
    a, b, y = needed(*ins[:2], outs[0])
    rows, made = rows_of(a.t() if attrs["transpose_a"] else a), rows_of(y)
    added = bias if residual is None else rows_of(residual)
    one = bias is None or residual is None
    if rows is None or made is None or not one or (residual is not None and added is None):
        flags = bool(attrs["transpose_a"]), bool(attrs["transpose_b"])
        rest = attrs["activation"], attrs["alpha"]
        return lambda: y.copy_(gemm(a, b, bias, residual, *flags, *rest))
    return _plain_gemm(attrs, rows, b.t() if attrs["transpose_b"] else b, added, made)


def _plain_gemm(
    attrs: Attrs, a: torch.Tensor, b: torch.Tensor, added: torch.Tensor | None, y: torch.Tensor
) -> Closure:
    activate, alpha = _ACTIVATE[ACTIVATIONS[attrs["activation"]]], attrs["alpha"]

    def run() -> None:
        if added is not None:
            torch.addmm(added, a, b, alpha=alpha, out=y)
        else:
            torch.mm(a, b, out=y)
            if alpha != 1:
                y.mul_(alpha)
        activate(y)

    return run


def _bmm_torch(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    (a, b, y), alpha = present((*ins, *outs)), attrs["alpha"]
    if alpha == 1:
        return lambda: torch.bmm(a, b, out=y)
    return lambda: torch.bmm(a, b, out=y).mul_(alpha)


ROWS = (
    # y = act(alpha * op(a) op(b) + bias + residual); a [.., m, k], b [k, n]; transposed: [k, m],
    # [n, k]. With several leading dims, a is not transposed.
    KernelRow(
        20,
        "gemm",
        "a, b, bias? [n], residual? [.., m, n] → y [.., m, n]",
        _gemm_torch,
        _gemm_makes,
        {
            "aten.mm.default": emits("gemm", "self mat2 - -"),
            "aten.matmul.default": _matmul,
            "aten.linear.default": emits("gemm", "input weight bias -", transpose_b=1),
            "aten.addmm.default": _addmm,
            "shardwright.gemm.default": emits(
                "gemm", "a b bias residual", "transpose_a transpose_b activation alpha"
            ),
        },
        attributes(
            transpose_a=("B", 0), transpose_b=("B", 0), activation=("B", 0), alpha=("d", 1.0)
        ),
        pairs=((0, 3),),
    ),
    KernelRow(
        21,
        "bmm",
        "a [b, m, k], b [b, k, n] → y [b, m, n]",
        _bmm_torch,
        _bmm_makes,
        {"aten.bmm.default": emits("bmm", "self mat2")},
        attributes(alpha=("d", 1.0)),
    ),
)
