"""Torch kernels of products of matrices, convolutions, pooling and attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwright.kernels.families.kernel import (
    Closure,
    Kernel,
    Tensors,
    activation_of,
    needed,
    present,
    rows_of,
    store,
)
from shardwright.kernels.operators import conv, gemm

_aten = torch.ops.aten
Attrs = Mapping[str, Any]


def _gemm(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    """By ``addmm`` with the one summand that there is; other forms by the operator itself."""
    a, b, bias, residual = ins
    a, b, y = needed(a), needed(b), needed(outs[0])
    left = a.t() if attrs["transpose_a"] else a
    right = b.t() if attrs["transpose_b"] else b
    rows, made = rows_of(left), rows_of(y)
    added = residual if residual is None else rows_of(residual)
    if (
        rows is None
        or made is None
        or None not in (bias, added)
        or (residual is None) != (added is None)
    ):
        return _whole_gemm(attrs, ins, y)
    return _plain_gemm(attrs, rows, right, bias if residual is None else added, made)


def _plain_gemm(
    attrs: Attrs, a: torch.Tensor, b: torch.Tensor, added: torch.Tensor | None, y: torch.Tensor
) -> Closure:
    activate, alpha = activation_of(attrs["activation"]), attrs["alpha"]

    def run() -> None:
        if added is not None:
            torch.addmm(added, a, b, alpha=alpha, out=y)
        else:
            torch.mm(a, b, out=y)
            if alpha != 1:
                y.mul_(alpha)
        if activate is not None:
            activate(y)

    if activate is None and alpha == 1 and added is None:
        return lambda: torch.mm(a, b, out=y)
    return run


def _whole_gemm(attrs: Attrs, ins: Tensors, y: torch.Tensor) -> Closure:
    a, b, bias, residual = ins
    a, b = needed(a), needed(b)
    transposed = bool(attrs["transpose_a"]), bool(attrs["transpose_b"])
    rest = attrs["activation"], attrs["alpha"]
    return lambda: y.copy_(gemm(a, b, bias, residual, *transposed, *rest))


def _bmm(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    (a, b, y), alpha = present((*ins, *outs)), attrs["alpha"]
    if alpha == 1:
        return lambda: torch.bmm(a, b, out=y)
    return lambda: torch.bmm(a, b, out=y).mul_(alpha)


def _conv(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    x, w, bias, residual = ins
    x, w, y = needed(x), needed(w), needed(outs[0])
    sizes = [list(attrs[name]) for name in ("stride", "padding", "dilation")]
    rest = attrs["groups"], attrs["activation"]
    return lambda: y.copy_(conv(x, w, bias, residual, *sizes, *rest))


def _pool(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    x, y = present((*ins, *outs))
    sizes = [list(attrs[name]) for name in ("kernel", "stride", "padding")]
    if attrs["mean"]:
        counted = bool(attrs["count_padding"])
        return lambda: y.copy_(_aten.avg_pool2d.default(x, *sizes, False, counted))
    return lambda: y.copy_(_aten.max_pool2d_with_indices.default(x, *sizes)[0])


# --- attention -------------------------------------------------------------------------------


choose = _aten.scaled_dot_product_attention.default
"""What picks one of a device's attention kernels."""


def _attention(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    q, k, v, mask = ins
    q, k, v = needed(q), needed(k), needed(v)
    causal, scale = bool(attrs["causal"]), attrs["scale"]
    if q.device.type == "cpu":
        mask = _in_four(mask)
        call = _aten._scaled_dot_product_flash_attention_for_cpu.default

        def run() -> None:
            *given, added = map(_by_rows, (q, k, v, mask))
            store(call(*given, 0.0, causal, attn_mask=added, scale=scale), outs)

        return run
    if outs[1] is None:
        return lambda: store([choose(q, k, v, mask, 0.0, causal, scale=scale)], outs)
    return lambda: store(attend(q, k, v, mask, causal, scale), outs)


def _attention_backward(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    dy, q, k, v, y, lse, mask = ins
    dy, q, k, v, y, lse = (needed(tensor) for tensor in (dy, q, k, v, y, lse))
    causal, scale = bool(attrs["causal"]), attrs["scale"]
    if q.device.type == "cpu":
        mask = _in_four(mask)
        call = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default

        def run() -> None:
            *given, added = map(_by_rows, (dy, q, k, v, y, lse, mask))
            store(call(*given, 0.0, causal, attn_mask=added, scale=scale), outs)

        return run
    return lambda: store(attend_backward(dy, q, k, v, y, lse, mask, causal, scale), outs)


def _by_rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor with its rows one after another, which the CPU's operator takes for granted."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def _in_four(mask: torch.Tensor | None) -> torch.Tensor | None:
    """A mask in four dimensions: the CPU's operator takes two or four."""
    return None if mask is None else mask[(None,) * (4 - mask.dim())]


def _scores(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> torch.Tensor:
    scores = torch.matmul(q, k.transpose(-2, -1)).float() * scale
    if mask is not None:
        scores += mask
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(hidden, float("-inf"))
    return scores


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention written out, for devices without the CPU's operator: y and lse [b, h, l]."""
    scores = _scores(q, k, mask, causal, scale)
    lse = torch.logsumexp(scores, -1)
    return torch.matmul(torch.exp(scores - lse[..., None]).to(v.dtype), v), lse


def attend_backward(
    dy: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    y: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of `attend` with respect to q, k and v."""
    weights = torch.exp(_scores(q, k, mask, causal, scale) - lse[..., None]).to(v.dtype)
    dv = torch.matmul(weights.transpose(-2, -1), dy)
    along = (dy * y).sum(-1, keepdim=True)
    ds = weights * (torch.matmul(dy, v.transpose(-2, -1)) - along) * scale
    return torch.matmul(ds, k), torch.matmul(ds.transpose(-2, -1), q), dv


KERNELS: Mapping[str, Kernel] = {
    "gemm": _gemm,
    "bmm": _bmm,
    "conv": _conv,
    "pool": _pool,
    "attention": _attention,
    "attention_bwd": _attention_backward,
}
