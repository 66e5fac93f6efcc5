"""Emitters of fused optimizers and of the counters of steps: one call for all parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.ir.values import Emitted
from shardwright.kernels.emitting.call import Emission, Emitter, NodeCall, Table, is_number
from shardwright.kernels.lowered import ABSENT


def _adam(kind: str) -> Emitter:
    def emit(call: NodeCall) -> Emission:
        given = call.arguments
        if not _is_plain(call):
            return None
        parameters, grads, averages, squares, largest, steps = (
            given[name]
            for name in (
                *("self", "grads", "exp_avgs"),
                *("exp_avg_sqs", "max_exp_avg_sqs", "state_steps"),
            )
        )
        count = len(parameters)
        made = _lists(call, count)
        biggest = made[4] if given["amsgrad"] else [ABSENT] * count
        attrs = {key: float(given[key]) for key in ("beta1", "beta2", "eps", "weight_decay")}
        attrs |= {key: int(given[key]) for key in ("amsgrad", "maximize")}
        inputs = [
            *(*parameters, *grads, *averages, *squares),
            *(largest or [None] * count),
            *(*steps, given["lr"]),
        ]
        outputs = [*made[0], *made[2], *made[3], *biggest]
        return [call.emit(kind, inputs, outputs, **attrs), *_same(call, grads, made[1])]

    return emit


def _sgd(call: NodeCall) -> Emission:
    given = call.arguments
    if not _is_plain(call) or given["is_first_step"]:
        return None
    parameters, grads = given["self"], given["grads"]
    momentums = given["momentum_buffer_list"]
    count = len(parameters)
    made = _lists(call, count)
    attrs = {key: float(given[key]) for key in ("weight_decay", "momentum", "dampening")}
    attrs |= {key: int(given[key]) for key in ("nesterov", "maximize")}
    inputs = [*parameters, *grads, *(momentums or [None] * count), given["lr"]]
    outputs = [*made[0], *(made[2] if momentums else [ABSENT] * count)]
    return [call.emit("sgd", inputs, outputs, **attrs), *_same(call, grads, made[1])]


def _is_plain(call: NodeCall) -> bool:
    return call.arguments["grad_scale"] is None and call.arguments["found_inf"] is None


def _lists(call: NodeCall, count: int) -> list[list[int]]:
    """What the operator returns, list by list; five lists, of which the last ones may be empty."""
    made = [int(place) for place in call.made]
    return [made[k * count : (k + 1) * count] for k in range(5)]


def _same(call: NodeCall, grads: Sequence[int], made: Sequence[int]) -> list[Emitted]:
    """The gradients that the operator returns as they were, where anyone reads them."""
    wanted = {place for place in call.wanted if place != ABSENT}
    return [
        _identity(call, old, new) for old, new in zip(grads, made, strict=True) if new in wanted
    ]


def _identity(call: NodeCall, old: int, new: int) -> Emitted:
    x = call.of(old)
    if x.strides != call.of(new).strides:
        return call.emit("copy", [old], [new])
    return call.emit("view", [old], [new], offset=0, shape=x.shape, strides=x.strides)


def _count(call: NodeCall) -> Emission:
    """Counters of steps: all at once, where they are single numbers."""
    by: Any = call.arguments["scalar"]
    places = call.arguments["self"]
    counters = all(call.of(p).dtype == "f32" and call.of(p).shape in ((), (1,)) for p in places)
    return [call.emit("step_inc", places, by=float(by))] if counters and is_number(by) else None


TABLE: Table = {
    "aten._fused_adam.tensor_lr": _adam("adam"),
    "aten._fused_adamw.tensor_lr": _adam("adamw"),
    "aten._fused_sgd.tensor_lr": _sgd,
    "aten._foreach_add.Scalar": _count,
}
