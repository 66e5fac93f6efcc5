"""Rules of elementwise kinds, sums, mean squares, and of what moves or fills memory."""

from __future__ import annotations

import math

from shardwright.ir.tensor_meta import torch_dtype
from shardwright.kernels.chains import parse_chain
from shardwright.kernels.legality.call import (
    Call,
    Made,
    Makes,
    Table,
    broadcast,
    holds,
    like,
    need,
    one_float,
    promoted,
    ranged,
    shaped,
)

_COMPLEX = ("c64", "c128")


def _said(call: Call) -> Made:
    """The output as the graph has it, of a kind that makes what it is told to."""
    said = call.outputs[0]
    assert said is not None, "a call has the operands that its kind needs"
    return Made(said.shape, said.dtype)


def _copy(call: Call) -> Makes:
    x, y = call["x"], _said(call)
    whole = len(x.shape) <= len(y.shape) and all(
        size in (1, full) for size, full in zip(reversed(x.shape), reversed(y.shape), strict=False)
    )
    need(whole, f"it copies {x} to {y}", "a shape that broadcasts to the output's")
    alike = x.dtype == y.dtype or not {x.dtype, y.dtype}.intersection(_COMPLEX)
    need(alike, f"it copies {x} to {y}", "complex numbers to stay what they are")
    return [[y]]


def _fill(call: Call) -> Makes:
    y = _said(call)
    holds(call, "value", y.dtype)
    return [[y]]


def _concat(call: Call) -> Makes:
    tensors = call.present
    need(
        len(tensors) == len(call.inputs) > 0 and len(tensors[0].shape) > 0,
        f"it reads {', '.join(map(str, tensors)) or 'nothing'}",
        "tensors of one dimension or more, none of them absent",
    )
    first = tensors[0]
    dim = ranged(call, "dim", 0, len(first.shape))
    rests = {(x.dtype, len(x.shape), x.shape[:dim], x.shape[dim + 1 :]) for x in tensors}
    need(
        len(rests) == 1,
        f"it reads {', '.join(map(str, tensors))}",
        f"tensors alike in all but the length of dimension {dim}",
    )
    joined = sum(x.shape[dim] for x in tensors)
    return [[Made((*first.shape[:dim], joined, *first.shape[dim + 1 :]), first.dtype)]]


# --- elementwise -----------------------------------------------------------------------------


def _add(call: Call) -> Makes:
    a, b = call["a"], call["b"]
    dtype, alpha = promoted(a, b), call.attrs["alpha"]
    if not (torch_dtype(dtype).is_floating_point or dtype in _COMPLEX):
        whole = math.isfinite(alpha) and alpha == int(alpha)
        need(whole, f"alpha={alpha} of {dtype}", "a whole number")
    if dtype == "bool":
        need(alpha == 1, f"alpha={alpha} of bool", "1")
    holds(call, "alpha", dtype)
    return [[Made(broadcast(a, b), dtype)]]


def _bias_add(call: Call) -> Makes:
    one_float(call)
    x = call["x"]
    need(len(x.shape) > 0, f"x is {x}", "one dimension or more")
    shaped(call, "bias", x.shape[-1:])
    return [[like(x)]]


def _relu(call: Call) -> Makes:
    x = call["x"]
    need(x.dtype not in ("bool", "f8", *_COMPLEX), f"x is {x}", "real numbers")
    return [[like(x)]]


def _relu_backward(call: Call) -> Makes:
    dy, x = call["dy"], call["x"]
    dtype = promoted(dy, x)
    need(dtype not in ("bool", *_COMPLEX), f"it reads {dy}, {x}", "real numbers")
    holds(call, "threshold", dtype)
    return [[Made(broadcast(dy, x), dtype)]]


def _chain(call: Call) -> Makes:
    chain, inputs = parse_chain(call.attrs["program"]), call.present
    said = [operand for operand in call.outputs if operand is not None]
    need(
        len(inputs) == len(call.inputs) >= max(chain.inputs, 1)
        and len(said) == len(call.outputs) == len(chain.outputs),
        f"'{chain}' has {len(inputs)} inputs and {len(said)} outputs",
        f"{max(chain.inputs, 1)} and {len(chain.outputs)}, none of them absent",
    )
    dtypes = {item.dtype for item in inputs} | {item.dtype for item in said}
    need(not dtypes.intersection(_COMPLEX), f"'{chain}' of {sorted(dtypes)}", "real numbers")
    shape = broadcast(*inputs)
    return [[Made(shape, item.dtype)] for item in said]


def _dropout(call: Call) -> Makes:
    x = call["x"]
    one_float(call, "x")
    shaped(call, "step", (1,))
    need(call["step"].dtype == "i64", f"step is {call['step']}", "i64[1]")
    need(0 <= call.attrs["p"] <= 1, f"p={call.attrs['p']}", "a number from 0 to 1")
    begins, whole = call.attrs["offsets"], call.attrs["whole_shape"]
    inside = len(begins) == len(whole) == len(x.shape) and all(
        0 <= begin <= begin + size <= full
        for begin, size, full in zip(begins, x.shape, whole, strict=True)
    )
    need(inside, f"{x} at {list(begins)} of a tensor {list(whole)}", "a slice that lies inside")
    return [[like(x)]]


# --- sums ------------------------------------------------------------------------------------


def _reduce_sum(call: Call) -> Makes:
    dtype, x, dims = one_float(call), call["x"], call.attrs["dims"]
    need(
        list(dims) == sorted(set(dims)) and all(0 <= dim < len(x.shape) for dim in dims),
        f"dims={list(dims)} of {x}",
        "dimensions of x from 0 up, ascending",
    )
    kept = tuple(1 if dim in dims else size for dim, size in enumerate(x.shape))
    left_out = tuple(size for dim, size in enumerate(x.shape) if dim not in dims)
    return [[Made(left_out, dtype), Made(kept, dtype)]]


def _mse(call: Call) -> Makes:
    dtype, a = one_float(call), call["a"]
    shaped(call, "b", a.shape)
    return [[Made(() if ranged(call, "reduction", 0, 3) else a.shape, dtype)]]


def _mse_backward(call: Call) -> Makes:
    one_float(call)
    a, dloss = call["a"], call["dloss"]
    shaped(call, "b", a.shape)
    ranged(call, "reduction", 0, 3)
    fits = broadcast(dloss, a) == a.shape
    need(fits, f"dloss is {dloss}", f"a shape that broadcasts to {list(a.shape)}")
    return [[like(a)]]


TABLE: Table = {
    "copy": _copy,
    "fill": _fill,
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
