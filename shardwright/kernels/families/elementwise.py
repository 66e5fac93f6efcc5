"""Torch kernels of elementwise kinds, sums, mean squares, and of what moves or fills memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwright.ir.dropout import dropout
from shardwright.kernels.chains import evaluate, parse_chain
from shardwright.kernels.families.kernel import Closure, Kernel, Tensors, needed, present, store

_aten = torch.ops.aten
Attrs = Mapping[str, Any]


def _copy(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    x, y = present((*ins, *outs))
    return lambda: y.copy_(x)


def _fill(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    (y,), value = present(outs), attrs["value"]
    return lambda: y.fill_(value)


def _view(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    return lambda: None


def _concat(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    tensors, (y,), dim = present(ins), present(outs), attrs["dim"]
    return lambda: torch.cat(tensors, dim, out=y)


def _add(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    a, b, y = present((*ins, *outs))
    alpha = attrs["alpha"] if y.is_floating_point() or y.is_complex() else int(attrs["alpha"])
    if alpha == 1:
        return lambda: torch.add(a, b, out=y)
    return lambda: torch.add(a, b, alpha=alpha, out=y)


def _bias_add(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    x, bias, y = present((*ins, *outs))
    return lambda: torch.add(x, bias, out=y)


def _relu(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    x, y = present((*ins, *outs))
    return lambda: torch.clamp_min(x, 0, out=y)


def _relu_backward(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    (dy, x, dx), threshold = present((*ins, *outs)), attrs["threshold"]
    call = _aten.threshold_backward.grad_input
    return lambda: call(dy, x, threshold, grad_input=dx)


def _chain(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    chain, inputs, made = parse_chain(attrs["program"]), present(ins), present(outs)
    dtypes = [out.dtype for out in made]
    return lambda: store(evaluate(chain, inputs, dtypes), made)


def _dropout(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    x, step, y = present((*ins, *outs))
    p, seed, site = attrs["p"], attrs["seed"], attrs["site"]
    offsets, whole = list(attrs["offsets"]), list(attrs["whole_shape"])
    return lambda: y.copy_(dropout(x, p, seed, step, site, offsets, whole))


def _reduce_sum(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    x, y = present((*ins, *outs))
    dims, scale, keep = list(attrs["dims"]), attrs["scale"], y.dim() == x.dim()
    call = _aten.sum.IntList_out
    if scale != 1 and y.dtype in (torch.float16, torch.bfloat16):
        return lambda: y.copy_(_wide_sum(x, dims, keep) * scale)

    def run() -> None:
        if dims:
            call(x, dims, keep, dtype=None, out=y)
        else:
            y.copy_(x)
        if scale != 1:
            y.mul_(scale)

    return run


def _wide_sum(x: torch.Tensor, dims: list[int], keep: bool) -> torch.Tensor:
    """A sum in f32: what a half holds once it is scaled may be more than it holds before."""
    return torch.sum(x, dims, keep, dtype=torch.float32) if dims else x.float()


def _mse(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    (a, b), (loss,), reduction = present(ins), present(outs), attrs["reduction"]
    call = _aten.mse_loss.default  # its out= resizes
    return lambda: loss.copy_(call(a, b, reduction))


def _mse_backward(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    (dloss, a, b), (da,), reduction = present(ins), present(outs), attrs["reduction"]
    call = _aten.mse_loss_backward.grad_input
    return lambda: call(dloss, a, b, reduction, grad_input=needed(da))


KERNELS: Mapping[str, Kernel] = {
    "copy": _copy,
    "fill": _fill,
    "view": _view,
    "concat": _concat,
    "add": _add,
    "bias_add": _bias_add,
    "relu": _relu,
    "relu_bwd": _relu_backward,
    "chain": _chain,
    "dropout": _dropout,
    "reduce_sum": _reduce_sum,
    "mse": _mse,
    "mse_bwd": _mse_backward,
}
