"""Optimizers: what a marker's step does to the parameters of one slot, by torch's fused kernels.

Comes in: a marker's hyper-parameters, and lists of parameters, gradients and states, parameter by
parameter. Goes out: calls of functional operators that make their new contents, which a runtime may
carry out in place. One call does all parameters of a slot. What always holds: the kernels' lists go
through memory as it lies, so that all tensors of a parameter have the same strides.

State that begins with zeros is what torch's optimizers make at their first step; only SGD's first
momentum would be another with dampening, which capture refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from shardwright.ir import Builder, IRValue
from shardwright.ir.operators import resolve, split_call

Attrs = Mapping[str, Any]
Values = Sequence[IRValue]

RATE_DTYPES = {"cuda": torch.float32}
"""What the kernels of a kind of device read the learning rate as, where that is not float64."""


@dataclass(frozen=True, slots=True)
class OptimizerTensors:
    """What one call reads or makes; each of ``states`` has as many values as ``parameters``."""

    parameters: Values
    states: Sequence[Values]


@dataclass(frozen=True, slots=True)
class Optimizer:
    """``states`` names the lists of state by their order in the marker; ``write`` writes the step.

    ``write`` takes the builder, the hyper-parameters, the learning rate, gradients, and what is
    renewed.
    """

    states: Callable[[Attrs], tuple[str, ...]]
    write: Callable[[Builder, Attrs, IRValue, Values, OptimizerTensors], OptimizerTensors]


def _adam_states(attrs: Attrs) -> tuple[str, ...]:
    largest = ("max_exp_avg_sq",) if attrs["amsgrad"] else ()
    return ("exp_avg", "exp_avg_sq", *largest, "step")


def _adam(
    op: str,
) -> Callable[[Builder, Attrs, IRValue, Values, OptimizerTensors], OptimizerTensors]:
    """Adam or AdamW, with the step counted first."""

    def write(
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

    return write


def _sgd_states(attrs: Attrs) -> tuple[str, ...]:
    return ("momentum_buffer",) if attrs["momentum"] else ()


def _sgd(
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


OPTIMIZERS: dict[str, Optimizer] = {
    "adam_step": Optimizer(_adam_states, _adam("aten._fused_adam.tensor_lr")),
    "adamw_step": Optimizer(_adam_states, _adam("aten._fused_adamw.tensor_lr")),
    "sgd_step": Optimizer(_sgd_states, _sgd),
}
"""By the marker's name."""
