"""The rows of optimizers: how a step is recorded, its state, and its update as calls.

An update takes lists of parameters, gradients and states, parameter by parameter, and emits one
call of a fused kernel of torch that makes the new contents of all. The kernels go through memory
as it lies, so that all tensors of a parameter have the same strides.

State that begins with zeros is what torch's optimizers make at their first step; only SGD's first
momentum would be another with dampening, which capture refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from shardwright.ir import Builder, IRValue
from shardwright.ir.operators import resolve, split_call

Attrs = Mapping[str, Any]
Values = Sequence[IRValue]

RATE_DTYPES = {"cuda": torch.float32}
"""What the kernels of a kind of device read the learning rate as, where that is not float64."""


class OptimizerTensors(NamedTuple):
    """What one call reads or makes; each of ``states`` has as many values as ``parameters``."""

    parameters: Values
    states: Sequence[Values]


Update = Callable[[Builder, Attrs, IRValue, Values, OptimizerTensors], OptimizerTensors]
"""Takes the hyper-parameters, the learning rate, the gradients, and what is renewed."""


@dataclass(frozen=True, slots=True)
class OptimizerRow:
    """What is known of an optimizer.

    hyper_parameters
        By torch's names; the learning rate is none, but an input of the graph.
    state
        From the hyper-parameters, the names of the state of a parameter, in a step's order.
    update
        Emits the step.
    """

    hyper_parameters: tuple[str, ...]
    state: Callable[[Attrs], tuple[str, ...]]
    update: Update


def _adam_state(attrs: Attrs) -> tuple[str, ...]:
    largest = ("max_exp_avg_sq",) if attrs["amsgrad"] else ()
    return ("exp_avg", "exp_avg_sq", *largest, "step")


def _adam_update(op: str) -> Update:
    """Adam or AdamW, with the step counted first."""

    def update(
        builder: Builder, attrs: Attrs, rate: IRValue, gradients: Values, old: OptimizerTensors
    ) -> OptimizerTensors:
        averages, squares, *largest, counts = old.states
        steps = _call(builder, "aten._foreach_add.Scalar", counts, counts, 1)
        beta1, beta2 = attrs["betas"]
        lists = [old.parameters, gradients, averages, squares, largest[0] if largest else []]
        made = _call(
            builder,
            op,
            chain(*lists),
            *lists,
            steps,
            lr=rate,
            beta1=beta1,
            beta2=beta2,
            weight_decay=attrs["weight_decay"],
            eps=attrs["eps"],
            amsgrad=attrs["amsgrad"],
            maximize=attrs["maximize"],
        )
        parameters, _, *states = _lists(made, len(old.parameters))
        return OptimizerTensors(parameters, [*states, steps])

    return update


def _sgd_state(attrs: Attrs) -> tuple[str, ...]:
    return ("momentum_buffer",) if attrs["momentum"] != 0 else ()


def _sgd_update(
    builder: Builder, attrs: Attrs, rate: IRValue, gradients: Values, old: OptimizerTensors
) -> OptimizerTensors:
    """SGD, with momentum or without."""
    lists = [old.parameters, gradients, old.states[0] if old.states else []]
    made = _call(
        builder,
        "aten._fused_sgd.tensor_lr",
        chain(*lists),
        *lists,
        weight_decay=attrs["weight_decay"],
        momentum=attrs["momentum"],
        lr=rate,
        dampening=attrs["dampening"],
        nesterov=attrs["nesterov"],
        maximize=attrs["maximize"],
        is_first_step=False,
    )
    parameters, _, *states = _lists(made, len(old.parameters))
    return OptimizerTensors(parameters, states)


def _call(builder: Builder, op: str, like: Iterable[IRValue], *args: Any, **kwargs: Any) -> Values:
    """Emit a call that makes new contents of the values in ``like``.

    Told what it makes, nobody has to try it: torch would run the kernel on tensors of full size.
    """
    inputs, attrs = split_call(
        resolve(op), args, kwargs, is_tensor=lambda item: isinstance(item, IRValue)
    )
    name = op.split(".")[1]
    outputs = [builder.value(name, old.shape, old.dtype, strides=old.strides) for old in like]
    made: Values = builder.emit(op, inputs, attrs, outputs=outputs)
    return made


def _lists(made: Values, count: int) -> list[Values]:
    """What a fused operator returns, one list of ``count`` after another."""
    return [made[start : start + count] for start in range(0, len(made), count)]


def _adam_row(op: str) -> OptimizerRow:
    names = ("betas", "eps", "weight_decay", "amsgrad", "maximize")
    return OptimizerRow(names, _adam_state, _adam_update(op))


OPTIMIZERS: Mapping[str, OptimizerRow] = {
    "adam_step": _adam_row("aten._fused_adam.tensor_lr"),
    "adamw_step": _adam_row("aten._fused_adamw.tensor_lr"),
    "sgd_step": OptimizerRow(
        ("momentum", "dampening", "weight_decay", "nesterov", "maximize"), _sgd_state, _sgd_update
    ),
}
"""By the name of the marker that stands for a step."""

RECORDED: Mapping[type[Optimizer], Callable[[Attrs], str]] = {
    SGD: lambda group: "sgd_step",
    Adam: lambda group: "adamw_step" if group["decoupled_weight_decay"] else "adam_step",
    AdamW: lambda group: "adamw_step" if group["decoupled_weight_decay"] else "adam_step",
}
"""As which marker the step of a parameter group is recorded."""
