"""Elementwise kinds with broadcasting, the fused kernels of many (``chain``), and dropout."""

from __future__ import annotations

import math
from typing import Any

import torch

from shardwright.ir.dropout import dropout
from shardwright.ir.tensor_meta import COMPLEX, TensorMeta, torch_dtype
from shardwright.kernels.attributes import attributes
from shardwright.kernels.chains import evaluate, parse_chain
from shardwright.kernels.row import (
    FLOATS,
    Emission,
    KernelCall,
    KernelRow,
    Makes,
    NodeCall,
    broadcast,
    emits,
    is_number,
    is_tensor,
    like,
    need,
    promoted,
)
from shardwright.kernels.torch_kernels import (
    Attrs,
    Closure,
    Tensors,
    bind_operator,
    by_operator,
    present,
    store,
)

_aten = torch.ops.aten

# --- what calls make -----------------------------------------------------------------------------


def _add_makes(call: KernelCall) -> Makes:
    a, b = call["a"], call["b"]
    dtype, alpha = promoted(a, b), call.attrs["alpha"]
    if not (torch_dtype(dtype).is_floating_point or dtype in COMPLEX):
        whole = math.isfinite(alpha) and alpha == int(alpha)
        need(whole, f"alpha={alpha} of {dtype}", "a whole number")
    if dtype == "bool":
        need(alpha == 1, f"alpha={alpha} of bool", "1")
    call.need_fits("alpha", dtype)
    return [[TensorMeta(broadcast(a, b), dtype)]]


def _bias_add_makes(call: KernelCall) -> Makes:
    call.float_dtype()
    x = call["x"]
    need(len(x.shape) > 0, f"x is {x}", "one dimension or more")
    call.need_shape(x.shape[-1:], "bias")
    return [[like(x)]]


def _relu_makes(call: KernelCall) -> Makes:
    x = call["x"]
    need(x.dtype not in ("bool", "f8", *COMPLEX), f"x is {x}", "real numbers")
    return [[like(x)]]


def _relu_backward_makes(call: KernelCall) -> Makes:
    dy, x = call["dy"], call["x"]
    dtype = promoted(dy, x)
    need(dtype not in ("bool", *COMPLEX), f"it reads {dy}, {x}", "real numbers")
    call.need_fits("threshold", dtype)
    return [[TensorMeta(broadcast(dy, x), dtype)]]


def _chain_makes(call: KernelCall) -> Makes:
    chain, inputs = parse_chain(call.attrs["program"]), call.present
    said = [operand for operand in call.outputs if operand is not None]
    need(
        len(inputs) == len(call.inputs) >= max(chain.inputs, 1)
        and len(said) == len(call.outputs) == len(chain.outputs),
        f"'{chain}' has {len(inputs)} inputs and {len(said)} outputs",
        f"{max(chain.inputs, 1)} and {len(chain.outputs)}, none of them absent",
    )
    dtypes = {item.dtype for item in inputs} | {item.dtype for item in said}
    need(not dtypes.intersection(COMPLEX), f"'{chain}' of {sorted(dtypes)}", "real numbers")
    shape = broadcast(*inputs)
    return [[TensorMeta(shape, item.dtype)] for item in said]


def _dropout_makes(call: KernelCall) -> Makes:
    x, step = call["x"], call["step"]
    call.float_dtype("x")
    call.need_shape((1,), "step")
    need(step.dtype == "i64", f"step is {step}", "i64[1]")
    need(0 <= call.attrs["p"] <= 1, f"p={call.attrs['p']}", "a number from 0 to 1")
    begins, whole = call.attrs["offsets"], call.attrs["whole_shape"]
    inside = len(begins) == len(whole) == len(x.shape) and all(
        0 <= begin <= begin + size <= full
        for begin, size, full in zip(begins, x.shape, whole, strict=True)
    )
    need(inside, f"{x} at {list(begins)} of a tensor {list(whole)}", "a slice that lies inside")
    return [[like(x)]]


# --- from operators ------------------------------------------------------------------------------


def _add(call: NodeCall) -> Emission:
    a, b, alpha = call.given("self other alpha")
    if _is_counter(call, a) and isinstance(b, int) and isinstance(alpha, int):
        return call.emit("step_inc", [a], by=float(b * alpha))
    if not is_tensor(a, b) or not is_number(alpha):
        return None
    left, right, made = call.of(a), call.of(b), call.of(call.made[0])
    is_bias = len(right.shape) == 1 and len(left.shape) > 1 and right.shape[0] == left.shape[-1]
    alike = left.dtype == right.dtype and left.dtype in FLOATS
    if is_bias and alike and alpha == 1 and made.shape == left.shape:
        return call.emit("bias_add", [a, b])
    return call.emit("add", [a, b], alpha=float(alpha))


def _is_counter(call: NodeCall, place: Any) -> bool:
    """Whether an addition counts: a whole number, as a batch norm has of its batches."""
    if not is_tensor(place):
        return False
    found, made = call.of(place), call.of(call.made[0])
    whole = found.dtype in ("i64", "i32") and found.dtype == made.dtype
    return whole and found.shape in ((), (1,))


def _relu_backward(call: NodeCall) -> Emission:
    dy, x, threshold = call.given("grad_output self threshold")
    if not is_tensor(dy, x) or not is_number(threshold):
        return None
    return call.emit("relu_bwd", [dy, x], threshold=float(threshold))


def _chain(call: NodeCall) -> Emission:
    inputs, program = call.given("inputs program")
    return call.emit("chain", inputs, program=program)


def _dropout(call: NodeCall) -> Emission:
    p, seed, site, offsets, whole = call.given("p seed site offsets whole_shape")
    return call.emit(
        "dropout",
        call.given("x step"),
        p=float(p),
        seed=_signed(seed),
        site=_signed(site),
        offsets=tuple(offsets),
        whole_shape=tuple(whole),
    )


def _signed(number: int) -> int:
    """A number of 64 bits as a signed one."""
    return (number + 2**63) % 2**64 - 2**63


# --- torch's kernels -----------------------------------------------------------------------------


def _add_torch(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    (y,) = present(outs)
    alpha = attrs["alpha"] if y.is_floating_point() or y.is_complex() else int(attrs["alpha"])
    return bind_operator(_aten.add.Tensor, ins, {"alpha": alpha}, outs)


def _chain_torch(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    chain, inputs, made = parse_chain(attrs["program"]), present(ins), present(outs)
    dtypes = [out.dtype for out in made]
    return lambda: store(evaluate(chain, inputs, dtypes), made)


def _dropout_torch(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    x, step, y = present((*ins, *outs))
    p, seed, site = attrs["p"], attrs["seed"], attrs["site"]
    offsets, whole = list(attrs["offsets"]), list(attrs["whole_shape"])
    return lambda: y.copy_(dropout(x, p, seed, step, site, offsets, whole))


ROWS = (
    KernelRow(
        8,
        "add",
        "a, b → y",
        _add_torch,
        _add_makes,
        {"aten.add.Tensor": _add},
        attributes(alpha=("d", 1.0)),
        elementwise=True,
    ),
    KernelRow(
        9,
        "bias_add",
        "x [.., n], bias [n] → y",
        by_operator(_aten.add.Tensor),
        _bias_add_makes,
        elementwise=True,
    ),
    KernelRow(
        10,
        "relu",
        "x → y",
        by_operator(_aten.clamp_min.default, min=0),
        _relu_makes,
        {"aten.relu.default": emits("relu", "self")},
        elementwise=True,
    ),
    KernelRow(
        11,
        "relu_bwd",
        "dy, x → dx",
        by_operator(_aten.threshold_backward.default, "threshold"),
        _relu_backward_makes,
        {"aten.threshold_backward.default": _relu_backward},
        attributes(threshold=("d", 0.0)),
        elementwise=True,
    ),
    # A program over one element: see `chains`.
    KernelRow(
        12,
        "chain",
        "x… → y…",
        _chain_torch,
        _chain_makes,
        {"shardwright.chain.default": _chain},
        attributes(program="s"),
        elementwise=True,
    ),
    KernelRow(
        13,
        "dropout",
        "x, step → y",
        _dropout_torch,
        _dropout_makes,
        {"shardwright.dropout.default": _dropout},
        attributes(p="d", seed="q", site="q", offsets="q*", whole_shape="q*"),
        elementwise=True,
    ),
)
