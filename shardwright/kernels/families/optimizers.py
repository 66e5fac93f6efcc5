"""Torch kernels of optimizers and counters: torch's fused ones, in place on the outputs.

What lies in its input's memory is renewed there; what does not is copied to the output first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwright.ir.overloads import callable_of
from shardwright.kernels.families.kernel import Closure, Kernel, Tensors, needed, present
from shardwright.kernels.kinds import BY_NAME
from shardwright.torch_internals import add_to_all, copy_all

_aten = torch.ops.aten
Attrs = Mapping[str, Any]


def operand_lists(kind: str, tensors: Sequence[Any]) -> list[list[Any]]:
    """The lists of a multi-tensor kind's inputs."""
    lists = BY_NAME[kind].lists
    count = len(tensors) // lists
    return [list(tensors[k * count : (k + 1) * count]) for k in range(lists)]


def _renewed(ins: Sequence[Tensors], outs: Tensors) -> tuple[list[Tensors], Closure]:
    """The outputs list by list, and what brings the old contents there."""
    count = len(ins[0])
    made = [outs[k * count : (k + 1) * count] for k in range(len(ins))]
    apart = [
        (new, old)
        for news, olds in zip(made, ins, strict=True)
        for new, old in zip(news, olds, strict=True)
        if new is not None and old is not None and new.data_ptr() != old.data_ptr()
    ]
    if not apart:
        return list(made), lambda: None
    news, olds = ([*tensors] for tensors in zip(*apart, strict=True))
    return list(made), lambda: copy_all(news, olds)


def _adam(kind: str) -> Kernel:
    def bind(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
        params, grads, averages, squares, largest, steps = operand_lists(kind, ins[:-1])
        made, bring = _renewed([params, averages, squares, largest], outs)
        new, new_averages, new_squares, new_largest = (present(items) for items in made)
        call = (_aten._fused_adam_ if kind == "adam" else _aten._fused_adamw_).tensor_lr
        numbers = {name: attrs[name] for name in ("beta1", "beta2", "weight_decay", "eps")}
        flags = {name: bool(attrs[name]) for name in ("amsgrad", "maximize")}
        options = {"lr": needed(ins[-1]), **numbers, **flags}
        lists = new, grads, new_averages, new_squares, new_largest, steps

        def run() -> None:
            bring()
            call(*lists, **options)

        return run

    return bind


def _sgd(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    params, grads, momentums = operand_lists("sgd", ins[:-1])
    (made, new_momentums), bring = _renewed([params, momentums], outs)
    lists = present(made), grads, present(new_momentums)
    numbers = {name: attrs[name] for name in ("weight_decay", "momentum", "dampening")}
    flags = {name: bool(attrs[name]) for name in ("nesterov", "maximize")}
    options = {"lr": needed(ins[-1]), **numbers, **flags, "is_first_step": False}
    call = callable_of(_aten._fused_sgd_.tensor_lr)

    def run() -> None:
        bring()
        call(*lists, **options)

    return run


def _count(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    (made,), bring = _renewed([ins], outs)
    counters = present(made)
    by = attrs["by"] if counters[0].is_floating_point() else int(attrs["by"])

    def run() -> None:
        bring()
        add_to_all(counters, by)

    return run


KERNELS: Mapping[str, Kernel] = {
    "adam": _adam("adam"),
    "adamw": _adam("adamw"),
    "sgd": _sgd,
    "step_inc": _count,
}
