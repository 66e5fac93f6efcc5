"""Emitters of elementwise operators, sums and mean squares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from shardwright.kernels.emitting.call import (
    Emission,
    Emitter,
    NodeCall,
    Table,
    is_number,
    is_tensor,
)


def _add(call: NodeCall) -> Emission:
    a, b, alpha = (call.arguments[name] for name in ("self", "other", "alpha"))
    if _is_counter(call, a) and isinstance(b, int) and isinstance(alpha, int):
        return [call.emit("step_inc", [a], by=float(b * alpha))]
    if not is_tensor(a, b) or not is_number(alpha):
        return None
    left, right, made = call.of(a), call.of(b), call.of(call.made[0])
    is_bias = len(right.shape) == 1 and len(left.shape) > 1 and right.shape[0] == left.shape[-1]
    alike = left.dtype == right.dtype and left.is_float
    if is_bias and alike and alpha == 1 and made.shape == left.shape:
        return [call.emit("bias_add", [a, b])]
    return [call.emit("add", [a, b], alpha=float(alpha))]


def _is_counter(call: NodeCall, place: Any) -> bool:
    """Whether an addition counts: a whole number, as a batch norm has of its batches."""
    if not is_tensor(place):
        return False
    found, made = call.of(place), call.of(call.made[0])
    whole = found.dtype in ("i64", "i32") and found.dtype == made.dtype
    return whole and found.shape in ((), (1,))


def _relu(call: NodeCall) -> Emission:
    return [call.emit("relu", [call.arguments["self"]])]


def _relu_backward(call: NodeCall) -> Emission:
    given = call.arguments
    if not is_tensor(given["grad_output"], given["self"]) or not is_number(given["threshold"]):
        return None
    inputs = [given["grad_output"], given["self"]]
    return [call.emit("relu_bwd", inputs, threshold=float(given["threshold"]))]


def _chain(call: NodeCall) -> Emission:
    return [call.emit("chain", call.arguments["inputs"], program=call.arguments["program"])]


def _dropout(call: NodeCall) -> Emission:
    given = call.arguments
    return [
        call.emit(
            "dropout",
            [given["x"], given["step"]],
            p=float(given["p"]),
            seed=_signed(given["seed"]),
            site=_signed(given["site"]),
            offsets=tuple(given["offsets"]),
            whole_shape=tuple(given["whole_shape"]),
        )
    ]


def _signed(number: int) -> int:
    """A number of 64 bits as a signed one."""
    return (number + 2**63) % 2**64 - 2**63


def _reduce(mean: bool) -> Emitter:
    def emit(call: NodeCall) -> Emission:
        x, made = call.of(0), call.of(call.made[0])
        if call.n_inputs != 1 or not x.is_float or made.dtype != x.dtype:
            return None
        dims = reduced_dims(call.arguments.get("dim"), len(x.shape))
        count = math.prod(x.shape[dim] for dim in dims)
        if mean and count == 0:
            return None
        return [call.emit("reduce_sum", [0], dims=dims, scale=1.0 / count if mean else 1.0)]

    return emit


def reduced_dims(dims: Any, ndim: int) -> tuple[int, ...]:
    """Which dimensions an operator reduces: all, where it names none; ascending, from 0 up."""
    if dims is None or dims == []:
        return tuple(range(ndim))
    listed: Sequence[int] = dims if isinstance(dims, list) else [dims]
    return tuple(sorted({dim % ndim if ndim else 0 for dim in listed})) if ndim else ()


def _mse(call: NodeCall) -> Emission:
    return _equal_shapes(call, "mse", ["self", "target"])


def _mse_backward(call: NodeCall) -> Emission:
    return _equal_shapes(call, "mse_bwd", ["grad_output", "self", "target"])


def _equal_shapes(call: NodeCall, kind: str, names: Sequence[str]) -> Emission:
    """Mean squares, where the two tensors do not broadcast."""
    inputs = [call.arguments[name] for name in names]
    a, b = call.of(inputs[-2]), call.of(inputs[-1])
    dtypes = {call.of(place).dtype for place in inputs}
    if a.shape != b.shape or len(dtypes) != 1 or not a.is_float:
        return None
    return [call.emit(kind, inputs, reduction=call.arguments["reduction"])]


TABLE: Table = {
    "aten.add.Tensor": _add,
    "aten.relu.default": _relu,
    "aten.threshold_backward.default": _relu_backward,
    "shardwright.chain.default": _chain,
    "shardwright.dropout.default": _dropout,
    "aten.sum.default": _reduce(mean=False),
    "aten.sum.dim_IntList": _reduce(mean=False),
    "aten.mean.default": _reduce(mean=True),
    "aten.mean.dim": _reduce(mean=True),
    "aten.mse_loss.default": _mse,
    "aten.mse_loss_backward.default": _mse_backward,
}
