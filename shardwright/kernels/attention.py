"""Scaled dot-product attention and its gradients, by an online softmax on the CPU."""

from __future__ import annotations

import math
from typing import Any

import torch

from shardwright.ir.tensor_meta import TensorMeta
from shardwright.kernels.attributes import attributes
from shardwright.kernels.row import (
    ABSENT,
    Emission,
    KernelCall,
    KernelRow,
    Makes,
    NodeCall,
    like,
    need,
)
from shardwright.kernels.torch_kernels import Attrs, Closure, Tensors, needed, store

_aten = torch.ops.aten

# --- what calls make -----------------------------------------------------------------------------


def _attended(call: KernelCall) -> tuple[TensorMeta, TensorMeta]:
    """Queries and keys, when all of an attention's operands fit them."""
    call.float_dtype("q", "k", "v", "mask")
    b, h, length, depth = call.shape_of("q", 4)
    q, k, mask = call["q"], call["k"], call.get("mask")
    fits = len(k.shape) == 4 and k.shape == (b, h, k.shape[2], depth)
    need(fits, f"q is {q} and k is {k}", "as many batches, heads and numbers a head")
    call.need_shape(k.shape, "v")
    (causal,) = call.flags("causal")
    if mask is not None:
        scores = (b, h, length, k.shape[2])
        ends = scores[len(scores) - len(mask.shape) :]
        wide = len(mask.shape) <= 4 and all(
            size in (1, full) for size, full in zip(mask.shape, ends, strict=True)
        )
        expected = f"what broadcasts to {list(scores)}, no causal"
        need(wide and not causal, f"mask is {mask}", expected)
    return q, k


def _sums(q: TensorMeta) -> list[TensorMeta]:
    """The logarithms of sums of exps, in f64 for f64, else in f32, as torch's kernels have them."""
    return [TensorMeta(q.shape[:3], "f64" if q.dtype == "f64" else "f32")]


def _attention_makes(call: KernelCall) -> Makes:
    q, _ = _attended(call)
    return [[like(q)], _sums(q)]


def _backward_makes(call: KernelCall) -> Makes:
    q, k = _attended(call)
    lse, sums = call["lse"], _sums(q)
    call.float_dtype("q", "dy", "y")
    call.need_shape(q.shape, "dy", "y")
    need(like(lse) in sums, f"lse is {lse}", " or ".join(map(str, sums)))
    return [[like(q)], [like(k)], [like(k)]]


# --- from operators ------------------------------------------------------------------------------


def _attention(call: NodeCall) -> Emission:
    inputs = call.given("query key value attn_mask")
    outputs = [*call.wanted, ABSENT][:2]
    return call.emit("attention", inputs, outputs, **_scaling(call)) if _is_plain(call) else None


def _attention_backward(call: NodeCall) -> Emission:
    inputs = call.given("grad_out query key value out logsumexp attn_mask")
    return call.emit("attention_bwd", inputs, **_scaling(call)) if _is_plain(call) else None


def _is_plain(call: NodeCall) -> bool:
    """Without dropout, and with a head of keys for each of queries."""
    return call.arguments["dropout_p"] == 0 and not call.arguments.get("enable_gqa")


def _scaling(call: NodeCall) -> dict[str, Any]:
    q, causal, scale = call.given("query is_causal scale")
    scale = 1.0 / math.sqrt(call.of(q).shape[-1]) if scale is None else float(scale)
    return {"causal": int(causal), "scale": scale}


# --- torch's kernels -----------------------------------------------------------------------------

choose = _aten.scaled_dot_product_attention.default
"""What picks one of a device's attention kernels."""


def _attention_torch(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    q, k, v = needed(*ins[:3])
    mask, causal, scale = ins[3], bool(attrs["causal"]), attrs["scale"]
    if q.device.type == "cpu":
        call = _aten._scaled_dot_product_flash_attention_for_cpu.default
        return _by_the_cpu(call, [q, k, v], mask, causal, scale, outs)
    if outs[1] is None:
        return lambda: store([choose(q, k, v, mask, 0.0, causal, scale=scale)], outs)
    return lambda: store(attend(q, k, v, mask, causal, scale), outs)


def _backward_torch(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    dy, q, k, v, y, lse = given = needed(*ins[:6])
    mask, causal, scale = ins[6], bool(attrs["causal"]), attrs["scale"]
    if q.device.type == "cpu":
        call = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return _by_the_cpu(call, given, mask, causal, scale, outs)
    return lambda: store(attend_backward(dy, q, k, v, y, lse, mask, causal, scale), outs)


def _by_the_cpu(
    call: Any,
    given: list[torch.Tensor],
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    outs: Tensors,
) -> Closure:
    """The CPU's operator, which takes rows without gaps for granted, and masks of 2 or 4 dims."""
    added = None if mask is None else mask[(None,) * (4 - mask.dim())]

    def run() -> None:
        *dense, last = (
            t if t is None or t.stride(-1) == 1 else t.contiguous() for t in (*given, added)
        )
        store(call(*dense, 0.0, causal, attn_mask=last, scale=scale), outs)

    return run


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
    row_sums = (dy * y).sum(-1, keepdim=True)
    ds = weights * (torch.matmul(dy, v.transpose(-2, -1)) - row_sums) * scale
    return torch.matmul(ds, k), torch.matmul(ds.transpose(-2, -1), q), dv


_FORWARD = (
    "aten.scaled_dot_product_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
)

ROWS = (
    # q [b, h, l, d], k and v [b, h, s, d]; lse [b, h, l] is the logarithm of the sum of exps.
    KernelRow(
        28,
        "attention",
        "q, k, v, mask? → y, lse?",
        _attention_torch,
        _attention_makes,
        dict.fromkeys(_FORWARD, _attention),
        attributes(causal="B", scale="d"),
    ),
    KernelRow(
        29,
        "attention_bwd",
        "dy, q, k, v, y, lse, mask? → dq, dk, dv",
        _backward_torch,
        _backward_makes,
        {"aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention_backward},
        attributes(causal="B", scale="d"),
    ),
)
