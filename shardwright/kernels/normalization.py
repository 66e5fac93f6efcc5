"""Sums, softmax, layer norm and batch norm, with their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from shardwright.ir.tensor_meta import TensorMeta
from shardwright.kernels.attributes import attributes
from shardwright.kernels.row import (
    ABSENT,
    Emission,
    Emitter,
    KernelCall,
    KernelRow,
    Makes,
    NodeCall,
    like,
    need,
)
from shardwright.kernels.torch_kernels import (
    Attrs,
    Closure,
    Tensors,
    bind_operator,
    needed,
    present,
    store,
)

_aten = torch.ops.aten

# --- sums ----------------------------------------------------------------------------------------


def _sum_makes(call: KernelCall) -> Makes:
    dtype, x, dims = call.float_dtype(), call["x"], call.attrs["dims"]
    need(
        list(dims) == sorted(set(dims)) and all(0 <= dim < len(x.shape) for dim in dims),
        f"dims={list(dims)} of {x}",
        "dimensions of x from 0 up, ascending",
    )
    kept = tuple(1 if dim in dims else size for dim, size in enumerate(x.shape))
    left_out = tuple(size for dim, size in enumerate(x.shape) if dim not in dims)
    return [[TensorMeta(left_out, dtype), TensorMeta(kept, dtype)]]


def _sum(call: NodeCall, *, mean: bool = False) -> Emission:
    x = call.of(0)
    if call.n_inputs != 1:
        return None
    dims = reduced_dims(call.arguments.get("dim"), len(x.shape))
    count = math.prod(x.shape[dim] for dim in dims)
    if mean and count == 0:
        return None
    return call.emit("reduce_sum", [0], dims=dims, scale=1.0 / count if mean else 1.0)


def _mean(call: NodeCall) -> Emission:
    return _sum(call, mean=True)


def reduced_dims(dims: Any, ndim: int) -> tuple[int, ...]:
    """Which dimensions an operator reduces: all, where it names none; ascending, from 0 up."""
    if dims is None or dims == []:
        return tuple(range(ndim))
    listed: Sequence[int] = dims if isinstance(dims, list) else [dims]
    return tuple(sorted({dim % ndim if ndim else 0 for dim in listed})) if ndim else ()


def _sum_torch(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
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


# --- softmax -------------------------------------------------------------------------------------


def _softmax_makes(call: KernelCall) -> Makes:
    call.float_dtype()
    of = call.get("y") or call["x"]
    call.need_shape(of.shape, "dy")
    call.number("dim", 0, len(of.shape))
    call.flags("log")
    return [[like(of)]]


def _softmax(log: int) -> Emitter:
    def emit(call: NodeCall) -> Emission:
        kind = "softmax" if call.n_inputs == 1 else "softmax_bwd"
        dim = call.arguments["dim"] % max(len(call.of(0).shape), 1)
        return call.emit(kind, range(call.n_inputs), dim=dim, log=log)

    return emit


def softmax_torch(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    """Torch's kernel of softmax or of its logarithm, or of the gradient of either."""
    of, dim = needed(*ins)[-1], attrs["dim"]
    if len(ins) == 1:
        packet = _aten._log_softmax if attrs["log"] else _aten._softmax
        return bind_operator(packet.default, [of, dim, False], {}, outs)
    packet = _aten._log_softmax_backward_data if attrs["log"] else _aten._softmax_backward_data
    return bind_operator(packet.default, [*ins, dim, of.dtype], {}, outs)


# --- layer norm ----------------------------------------------------------------------------------


def _rows(call: KernelCall) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of rows' statistics, and that of a row, whose weight and bias fit it."""
    x = call["x"]
    split = len(x.shape) - call.number("dims", 1, len(x.shape) + 1)
    call.need_shape(x.shape[split:], "w", "b")
    return (*x.shape[:split], *[1] * (len(x.shape) - split)), x.shape[split:]


def _layer_norm_makes(call: KernelCall) -> Makes:
    dtype = call.float_dtype()
    shape, _ = _rows(call)
    statistics = [TensorMeta(shape, found) for found in dict.fromkeys((dtype, "f32"))]
    return [[like(call["x"])], statistics, statistics]


def _layer_norm_backward_makes(call: KernelCall) -> Makes:
    dtype, x = call.float_dtype(), call["x"]
    statistics, row = _rows(call)
    call.need_shape(x.shape, "dy")
    call.need_shape(statistics, "mean", "rstd")
    made = [[TensorMeta(row, dtype)] if call.get(name) is not None else [] for name in ("w", "b")]
    return [[like(x)], *made]


def _layer_norm(call: NodeCall) -> Emission:
    shape, eps = call.given("normalized_shape eps")
    outputs = [call.results[0], *call.wanted[1:], ABSENT, ABSENT][:3]
    inputs = call.given("input weight bias")
    return call.emit("layer_norm", inputs, outputs, dims=len(shape), eps=float(eps))


def _layer_norm_backward(call: NodeCall) -> Emission:
    dims = len(call.arguments["normalized_shape"])
    inputs = call.given("grad_out input mean rstd weight bias")
    return call.emit("layer_norm_bwd", inputs, call.wanted, dims=dims)


def _layer_norm_torch(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    (x,), (w, b), eps = needed(ins[0]), ins[1:], attrs["eps"]
    shape = list(x.shape[x.dim() - attrs["dims"] :])
    return bind_operator(_aten.native_layer_norm.default, [x, shape, w, b, eps], {}, outs)


def _layer_norm_backward_torch(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    (dy, x, *given), (w, b) = needed(*ins[:4]), ins[4:]
    leading = x.shape[: x.dim() - attrs["dims"]]
    shape, mask = list(x.shape[len(leading) :]), [out is not None for out in outs]
    narrow = (*leading, *[1] * attrs["dims"])
    call = _aten.native_layer_norm_backward.default

    def run() -> None:
        statistics = (item.contiguous().view(narrow) for item in given)
        store(call(dy, x, shape, *statistics, w, b, mask), outs)

    return run


# --- batch norm ----------------------------------------------------------------------------------


def _channels(call: KernelCall, *names: str) -> tuple[int]:
    """The shape of a channel's statistics, which these inputs have."""
    x = call["x"]
    need(len(x.shape) >= 2, f"x is {x}", "[batch, channels, ..]")
    call.need_shape(x.shape[1:2], *names)
    return (x.shape[1],)


def _are_given(call: KernelCall, *names: str) -> bool:
    """Whether two inputs are there; there are both or none."""
    given = [call.get(name) is not None for name in names]
    need(given[0] == given[1], f"one of {' and '.join(names)} is absent", "both or none")
    return given[0]


def _batch_norm_makes(call: KernelCall) -> Makes:
    dtype, (training,) = call.float_dtype(), call.flags("training")
    shape = _channels(call, "w", "b", "running_mean", "running_var")
    renewed = _are_given(call, "running_mean", "running_var")
    need(training or renewed, "no running statistics", "those that an evaluation reads")
    statistics = [TensorMeta(shape, dtype)]
    saved, new = statistics if training else [], statistics if training and renewed else []
    return [[like(call["x"])], saved, saved, new, new]


def _batch_norm_backward_makes(call: KernelCall) -> Makes:
    dtype, x, (training,) = call.float_dtype(), call["x"], call.flags("training")
    shape = _channels(call, "w", "running_mean", "running_var", "mean", "invstd")
    call.need_shape(x.shape, "dy")
    running = _are_given(call, "running_mean", "running_var")
    saved = _are_given(call, "mean", "invstd")
    needed_ones = "the batch's statistics" if training else "running statistics"
    found = saved if training else running
    need(found, f"no {needed_ones}", f"those with training={int(training)}")
    statistics = [TensorMeta(shape, dtype)]
    return [[like(x)], statistics, statistics]


def _batch_norm(call: NodeCall) -> Emission:
    """Batch norm; one that renews running statistics has them among its results."""
    given = call.arguments
    training = bool(given.get("training", False))
    running = [given.get("running_mean"), given.get("running_var")]
    if training and running[0] is not None and len(call.results) < 5:
        return None
    outputs = [call.results[0], *call.wanted[1:], *[ABSENT] * 4][:5]
    attrs = {"momentum": float(given.get("momentum", 0.1)), "eps": float(given["eps"])}
    inputs = [*call.given("input weight bias"), *running]
    return call.emit("batch_norm", inputs, outputs, training=int(training), **attrs)


def _batch_norm_backward(call: NodeCall) -> Emission:
    train, eps = call.given("train eps")
    names = "grad_out input weight running_mean running_var save_mean save_invstd"
    inputs = call.given(names)
    if not train:
        inputs[-2:] = [None, None]
    return call.emit("batch_norm_bwd", inputs, call.wanted, training=int(train), eps=float(eps))


def _batch_norm_torch(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
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


def _batch_norm_backward_torch(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    args = [*ins, bool(attrs["training"]), attrs["eps"], [out is not None for out in outs]]
    return bind_operator(_aten.native_batch_norm_backward.default, args, {}, outs)


_BATCH_NORMS = (
    "native_batch_norm.default",
    "batch_norm.default",
    "_native_batch_norm_legit.no_stats",
    "_native_batch_norm_legit_functional.default",
    "_native_batch_norm_legit_no_training.default",
)

ROWS = (
    # y = scale * the sum over dims; dims that are kept have size 1 in y, or are left out.
    KernelRow(
        16,
        "reduce_sum",
        "x → y",
        _sum_torch,
        _sum_makes,
        {
            "aten.sum.default": _sum,
            "aten.sum.dim_IntList": _sum,
            "aten.mean.default": _mean,
            "aten.mean.dim": _mean,
        },
        attributes(dims="q*", scale="d"),
    ),
    KernelRow(
        22,
        "softmax",
        "x → y",
        softmax_torch,
        _softmax_makes,
        {
            "aten._softmax.default": _softmax(log=0),
            "aten._log_softmax.default": _softmax(log=1),
            "aten.softmax.int": _softmax(log=0),
            "aten.log_softmax.int": _softmax(log=1),
        },
        attributes(dim="i", log="B"),
        elementwise=True,
    ),
    KernelRow(
        23,
        "softmax_bwd",
        "dy, y → dx",
        softmax_torch,
        _softmax_makes,
        {
            "aten._softmax_backward_data.default": _softmax(log=0),
            "aten._log_softmax_backward_data.default": _softmax(log=1),
        },
        attributes(dim="i", log="B"),
        elementwise=True,
    ),
    # dims is how many trailing dimensions are normalized.
    KernelRow(
        24,
        "layer_norm",
        "x, w?, b? → y, mean?, rstd?",
        _layer_norm_torch,
        _layer_norm_makes,
        dict.fromkeys(("aten.native_layer_norm.default", "aten.layer_norm.default"), _layer_norm),
        attributes(dims="i", eps="d"),
        pairs=((0, 0),),
    ),
    KernelRow(
        25,
        "layer_norm_bwd",
        "dy, x, mean, rstd, w?, b? → dx?, dw?, db?",
        _layer_norm_backward_torch,
        _layer_norm_backward_makes,
        {"aten.native_layer_norm_backward.default": _layer_norm_backward},
        attributes(dims=("i", 1)),
        pairs=((0, 0), (0, 1)),
    ),
    # In training the last two outputs are the new running statistics.
    KernelRow(
        26,
        "batch_norm",
        "x, w?, b?, running_mean?, running_var? → y, mean?, invstd?, new_mean?, new_var?",
        _batch_norm_torch,
        _batch_norm_makes,
        {f"aten.{name}": _batch_norm for name in _BATCH_NORMS},
        attributes(training="B", momentum="d", eps="d"),
        pairs=((0, 0), (3, 3), (4, 4)),
    ),
    KernelRow(
        27,
        "batch_norm_bwd",
        "dy, x, w?, running_mean?, running_var?, mean?, invstd? → dx?, dw?, db?",
        _batch_norm_backward_torch,
        _batch_norm_backward_makes,
        {"aten.native_batch_norm_backward.default": _batch_norm_backward},
        attributes(training="B", eps="d"),
        pairs=((0, 0), (0, 1)),
    ),
)
