"""Fused optimizers and counters of steps: one call for all parameters, which renews lists.

How a parameter lies, and its gradient and state, is the planner's (`row.CONSTRAINTS`: ``alike``).
Torch's kernels work in place on the outputs: what does not lie in its input's memory is copied to
the output first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwright.ir.overloads import callable_of
from shardwright.ir.tensor_meta import TensorMeta
from shardwright.ir.values import Emitted
from shardwright.kernels.attributes import attributes
from shardwright.kernels.memory import identity
from shardwright.kernels.row import (
    ABSENT,
    FLOATS,
    Emission,
    Emitter,
    KernelCall,
    KernelRow,
    Makes,
    NodeCall,
    is_number,
    like,
    need,
)
from shardwright.kernels.torch_kernels import Attrs, Closure, Tensors, TorchKernel, needed, present
from shardwright.torch_internals import add_to_all, copy_all

_aten = torch.ops.aten
COUNTS = {"i64", "i32", "i16", "i8"}
"""The dtypes of whole counters."""


def _lists(items: Sequence[Any], count: int) -> list[list[Any]]:
    """So many lists of equal length, one after another."""
    size = len(items) // count
    return [list(items[k * size : (k + 1) * size]) for k in range(count)]


# --- what calls make -----------------------------------------------------------------------------


def _updated(call: KernelCall, wanted: Mapping[str, bool]) -> Makes:
    """The lists that are renewed; those of ``wanted`` are there where it says so."""
    kind = call.kind
    names = [name.rstrip("…") for name in kind.names(0)[: kind.lists]]
    lists = dict(zip(names, _lists(call.inputs[:-1], kind.lists), strict=True))
    for k, parameter in enumerate(lists["params"]):
        need(parameter is not None, f"params[{k}] is absent", "a tensor")
        for name, is_wanted in wanted.items():
            _check_state(f"{name}[{k}]", lists[name][k], parameter, is_wanted)
    for k, counter in enumerate(lists.get("steps", ())):
        _check_number(f"steps[{k}]", counter)
    _check_number("lr", call.inputs[-1])
    return _renewed(call, [old for place in kind.written for old in lists[names[place]]])


def _renewed(call: KernelCall, olds: Sequence[TensorMeta | None]) -> Makes:
    """What these operands become: there is an output for each."""
    for k, (old, new) in enumerate(zip(olds, call.outputs, strict=True)):
        need(old is None or new is not None, f"output {k} is absent", f"what {old} becomes")
    return [[like(old)] if old is not None else [] for old in olds]


def _check_state(
    name: str, found: TensorMeta | None, parameter: TensorMeta | None, wanted: bool
) -> None:
    """A gradient, or a state, is there where it is wanted, and is of the parameter's shape."""
    need((found is not None) == wanted, f"{name} is {found}", "a tensor" if wanted else "none")
    if found is not None and parameter is not None:
        alike = like(found) == like(parameter) and found.dtype in FLOATS
        need(alike, f"{name} is {found}", f"floats as the parameter, {parameter}")


def _check_number(name: str, found: TensorMeta | None) -> None:
    fits = found is not None and found.dtype in FLOATS and math.prod(found.shape) == 1
    need(fits, f"{name} is {found}", "one floating-point number")


def _sgd_makes(call: KernelCall) -> Makes:
    call.flags("nesterov", "maximize")
    keeps = call.attrs["momentum"] != 0
    return _updated(call, {"params": True, "grads": True, "momentums": keeps})


def _adam_makes(call: KernelCall) -> Makes:
    largest, _ = call.flags("amsgrad", "maximize")
    each = dict.fromkeys(("params", "grads", "averages", "squares"), True)
    return _updated(call, {**each, "largest": largest})


def _counted_makes(call: KernelCall) -> Makes:
    by, dtypes = call.attrs["by"], {counter.dtype for counter in call.present}
    need(
        len(call.present) == len(call.inputs)
        and all(math.prod(counter.shape) == 1 for counter in call.present)
        and len(dtypes) == 1
        and dtypes <= {*FLOATS, *COUNTS},
        f"it counts {', '.join(map(str, call.inputs))}",
        "numbers of one dtype, each alone, none of them absent",
    )
    if dtypes <= COUNTS:
        whole = math.isfinite(by) and by == int(by)
        need(whole, f"by={by} of {', '.join(dtypes)}", "a whole number")
        call.need_fits("by", *dtypes)
    return _renewed(call, call.inputs)


# --- from operators ------------------------------------------------------------------------------


def _adam(kind: str) -> Emitter:
    names = "self grads exp_avgs exp_avg_sqs max_exp_avg_sqs state_steps"
    floats, flags = ("beta1", "beta2", "eps", "weight_decay"), ("amsgrad", "maximize")

    def emit(call: NodeCall) -> Emission:
        return _update(call, kind, call.given(names), (0, 2, 3, 4), floats, flags)

    return emit


def _sgd(call: NodeCall) -> Emission:
    if call.arguments["is_first_step"]:
        return None
    lists = call.given("self grads momentum_buffer_list")
    floats, flags = ("weight_decay", "momentum", "dampening"), ("nesterov", "maximize")
    return _update(call, "sgd", lists, (0, 2), floats, flags)


def _update(
    call: NodeCall,
    kind: str,
    lists: Sequence[Sequence[int]],
    written: Sequence[int],
    floats: Sequence[str],
    flags: Sequence[str],
) -> Emission:
    """A call on lists, of which some may be empty; the operator returns all, as they then are."""
    given, count = call.arguments, len(lists[0])
    if given["grad_scale"] is not None or given["found_inf"] is not None:
        return None
    left: list[int] = [*call.made]
    made: list[list[int]] = []
    for listed in lists[: max(written) + 1]:
        made.append(left[: len(listed)])
        left = left[len(listed) :]
    inputs = [place for listed in lists for place in listed or [ABSENT] * count]
    outputs = [place for k in written for place in made[k] or [ABSENT] * count]
    attrs = {name: float(given[name]) for name in floats} | {n: int(given[n]) for n in flags}
    emitted = call.emit(kind, [*inputs, given["lr"]], outputs, **attrs)
    return [emitted, *_same(call, lists[1], made[1])]


def _same(call: NodeCall, grads: Sequence[int], made: Sequence[int]) -> list[Emitted]:
    """The gradients that the operator returns as they were, where anyone reads them."""
    wanted = set(call.wanted)
    return [identity(call, old, new) for old, new in zip(grads, made, strict=True) if new in wanted]


def _count(call: NodeCall) -> Emission:
    """Counters of steps: all at once, where they are single numbers."""
    places, by = call.given("self scalar")
    counters = all(call.of(p).dtype == "f32" and call.of(p).shape in ((), (1,)) for p in places)
    return call.emit("step_inc", places, by=float(by)) if counters and is_number(by) else None


# --- torch's kernels -----------------------------------------------------------------------------


def _in_place(ins: Sequence[Tensors], outs: Tensors) -> tuple[list[list[torch.Tensor]], Closure]:
    """The outputs list by list, and what brings the old contents there."""
    made = _lists(outs, len(ins))
    apart = [
        (new, old)
        for news, olds in zip(made, ins, strict=True)
        for new, old in zip(news, olds, strict=True)
        if new is not None and old is not None and new.data_ptr() != old.data_ptr()
    ]
    lists = [present(news) for news in made]
    if not apart:
        return lists, lambda: None
    news, olds = ([*tensors] for tensors in zip(*apart, strict=True))
    return lists, lambda: copy_all(news, olds)


_FLAGS = {"amsgrad", "nesterov", "maximize"}


def _by_torch(lists: int, written: Sequence[int], call: Any, **fixed: Any) -> TorchKernel:
    """A fused optimizer of torch on so many lists, of which it renews some."""

    def bind(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
        tensors = _lists(ins[:-1], lists)
        made, bring = _in_place([tensors[k] for k in written], outs)
        for k, renewed in zip(written, made, strict=True):
            tensors[k] = renewed
        flags = {name: bool(attrs[name]) for name in _FLAGS & attrs.keys()}
        options = {**attrs, **flags, **fixed, "lr": needed(ins[-1])[0]}

        def run() -> None:
            bring()
            call(*tensors, **options)

        return run

    return bind


def _count_torch(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    (counters,), bring = _in_place([ins], outs)
    by = attrs["by"] if counters[0].is_floating_point() else int(attrs["by"])

    def run() -> None:
        bring()
        add_to_all(counters, by)

    return run


def _adam_row(kind_id: int, name: str, op: str, call: Any) -> KernelRow:
    return KernelRow(
        kind_id,
        name,
        "params…, grads…, averages…, squares…, largest…, steps…, lr → params…, averages…, "
        "squares…, largest…",
        _by_torch(6, (0, 2, 3, 4), call),
        _adam_makes,
        {op: _adam(name)},
        attributes(
            beta1=("d", 0.9),
            beta2=("d", 0.999),
            eps=("d", 1e-8),
            weight_decay=("d", 0.0),
            amsgrad=("B", 0),
            maximize=("B", 0),
        ),
        lists=6,
        written=(0, 2, 3, 4),
        constrains=("alike",),
    )


ROWS = (
    # lr is one element, a step counter one element a parameter. Kernels go through a parameter and
    # what belongs to it in the order of memory.
    KernelRow(
        40,
        "sgd",
        "params…, grads…, momentums…, lr → params…, momentums…",
        _by_torch(3, (0, 2), callable_of(_aten._fused_sgd_.tensor_lr), is_first_step=False),
        _sgd_makes,
        {"aten._fused_sgd.tensor_lr": _sgd},
        attributes(
            weight_decay=("d", 0.0),
            momentum=("d", 0.0),
            dampening=("d", 0.0),
            nesterov=("B", 0),
            maximize=("B", 0),
        ),
        lists=3,
        written=(0, 2),
        constrains=("alike",),
    ),
    _adam_row(41, "adam", "aten._fused_adam.tensor_lr", _aten._fused_adam_.tensor_lr),
    # As adam; weight decay acts on the parameter.
    _adam_row(42, "adamw", "aten._fused_adamw.tensor_lr", _aten._fused_adamw_.tensor_lr),
    KernelRow(
        43,
        "step_inc",
        "steps… → steps…",
        _count_torch,
        _counted_makes,
        {"aten._foreach_add.Scalar": _count},
        attributes(by=("d", 1.0)),
        lists=1,
        written=(0,),
    ),
)
