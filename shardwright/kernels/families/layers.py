"""Torch kernels of softmax, norms, cross-entropy and embeddings, with their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwright.kernels.families.kernel import (
    Closure,
    Kernel,
    Tensors,
    needed,
    present,
    rows_of,
    store,
)

_aten = torch.ops.aten
Attrs = Mapping[str, Any]


def _softmax(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    (x, y), dim = present((*ins, *outs)), attrs["dim"]
    if not y.is_contiguous():  # which torch's forms with out= take for granted
        made = _aten._log_softmax.default if attrs["log"] else _aten._softmax.default
        return lambda: y.copy_(made(x, dim, False))
    call = _aten._log_softmax.out if attrs["log"] else _aten._softmax.out
    return lambda: call(x, dim, False, out=y)


def _softmax_backward(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    (dy, y, dx), dim = present((*ins, *outs)), attrs["dim"]
    if not dx.is_contiguous():
        packet = _aten._log_softmax_backward_data if attrs["log"] else _aten._softmax_backward_data
        return lambda: dx.copy_(packet.default(dy, y, dim, y.dtype))
    if attrs["log"]:
        log = _aten._log_softmax_backward_data.out
        return lambda: log(dy, y, dim, y.dtype, out=dx)
    call = _aten._softmax_backward_data.out
    return lambda: call(dy, y, dim, y.dtype, grad_input=dx)


# --- norms -----------------------------------------------------------------------------------


def _layer_norm(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    x, w, b = ins
    x, eps = needed(x), attrs["eps"]
    shape = list(x.shape[x.dim() - attrs["dims"] :])
    call = _aten.native_layer_norm.default
    return lambda: store(call(x, shape, w, b, eps), outs)


def _layer_norm_backward(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    dy, x, mean, rstd, w, b = ins
    x = needed(x)
    leading = x.shape[: x.dim() - attrs["dims"]]
    shape, mask = list(x.shape[len(leading) :]), [out is not None for out in outs]
    narrow = (*leading, *[1] * attrs["dims"])
    given = needed(mean), needed(rstd)
    call = _aten.native_layer_norm_backward.default

    def run() -> None:
        statistics = (item.contiguous().view(narrow) for item in given)
        store(call(dy, x, shape, *statistics, w, b, mask), outs)

    return run


def _batch_norm(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    *given, mean, var = ins
    momentum, eps = attrs["momentum"], attrs["eps"]
    if not attrs["training"]:
        evaluate = _aten._native_batch_norm_legit_no_training.default
        return lambda: store(evaluate(*given, mean, var, momentum, eps)[:1], outs)
    if mean is None:
        alone = _aten._native_batch_norm_legit.no_stats
        return lambda: store(alone(*given, True, momentum, eps), outs)
    renew = _aten._native_batch_norm_legit_functional.default
    return lambda: store(renew(*given, mean, var, True, momentum, eps), outs)


def _batch_norm_backward(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    training, eps = bool(attrs["training"]), attrs["eps"]
    mask = [out is not None for out in outs]
    call = _aten.native_batch_norm_backward.default
    return lambda: store(call(*ins, training, eps, mask), outs)


# --- losses and embeddings -------------------------------------------------------------------


def _cross_entropy(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    x, target, weight = ins
    (loss, total, log_probs), reduction = present(outs), attrs["reduction"]
    ignore, nll = attrs["ignore"], _aten.nll_loss_forward.output
    probs = _softmax({"dim": 1, "log": 1}, [x], [log_probs])

    def run() -> None:
        probs()
        nll(log_probs, target, weight, reduction, ignore, output=loss, total_weight=total)

    return run


def _cross_entropy_backward(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    dloss, log_probs, target, total, weight = ins
    (dx,), log_probs = present(outs), needed(log_probs)
    reduction, ignore = attrs["reduction"], attrs["ignore"]
    nll = _aten.nll_loss_backward.default

    def run() -> None:
        inner = nll(dloss, log_probs, target, weight, reduction, ignore, total)
        _softmax_backward({"dim": 1, "log": 1}, [inner, log_probs], [dx])()

    return run


def _embedding(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    w, index, y = present((*ins, *outs))
    rows = rows_of(y)
    if rows is None or not index.is_contiguous():
        return lambda: y.copy_(_aten.embedding.default(w, index))
    flat = index.view(-1)
    return lambda: torch.index_select(w, 0, flat, out=rows)


def _embedding_backward(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    (dy, index, dw), padding = present((*ins, *outs)), attrs["padding"]

    def run() -> None:
        dw.zero_().index_add_(0, index.reshape(-1), dy.reshape(-1, dw.shape[1]))
        if padding >= 0:
            dw[padding].zero_()

    return run


KERNELS: Mapping[str, Kernel] = {
    "softmax": _softmax,
    "softmax_bwd": _softmax_backward,
    "layer_norm": _layer_norm,
    "layer_norm_bwd": _layer_norm_backward,
    "batch_norm": _batch_norm,
    "batch_norm_bwd": _batch_norm_backward,
    "cross_entropy": _cross_entropy,
    "cross_entropy_bwd": _cross_entropy_backward,
    "embedding": _embedding,
    "embedding_bwd": _embedding_backward,
}
