"""Optimizers whose step a graph can hold, and what of them the step reads.

Comes in: an optimizer of torch. Goes out: for each parameter group a `OptimizerGroup`: the marker,
its hyper-parameters by torch's names, and the names of the state that a parameter has. What always
holds: the learning rate is no hyper-parameter; it is an input of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from shardwright.errors import CaptureError
from shardwright.torch_internals import has_step_hooks


@dataclass(frozen=True)
class OptimizerRow:
    """``op`` and ``state`` say, from the hyper-parameters, the marker and the names of state."""

    op: Callable[[Mapping[str, Any]], str]
    hyper_parameters: tuple[str, ...]
    state: Callable[[Mapping[str, Any]], tuple[str, ...]]


def _adam_op(group: Mapping[str, Any]) -> str:
    return "adamw_step" if group["decoupled_weight_decay"] else "adam_step"


def _adam_state(group: Mapping[str, Any]) -> tuple[str, ...]:
    largest = ("max_exp_avg_sq",) if group["amsgrad"] else ()
    return ("exp_avg", "exp_avg_sq", *largest, "step")


_SGD = OptimizerRow(
    lambda group: "sgd_step",
    ("momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    lambda group: ("momentum_buffer",) if group["momentum"] != 0 else (),
)
_ADAM = OptimizerRow(_adam_op, ("betas", "eps", "weight_decay", "amsgrad", "maximize"), _adam_state)

RULES: dict[type[Optimizer], OptimizerRow] = {SGD: _SGD, Adam: _ADAM, AdamW: _ADAM}


@dataclass(frozen=True)
class OptimizerGroup:
    """One parameter group of an optimizer, as a step reads it.

    ``name`` is the program's name for the optimizer, ``index`` the group's number in it.
    """

    optimizer: Optimizer
    name: str
    index: int
    op: str
    attrs: dict[str, Any]
    state_names: tuple[str, ...]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The group's parameters, in the optimizer's order."""
        return list(self.optimizer.param_groups[self.index]["params"])

    def state_of(self, parameter: torch.Tensor, key: str) -> torch.Tensor | None:
        """The state that exists for a parameter; None where the first step will make it."""
        state = self.optimizer.state
        found = state[parameter].get(key) if parameter in state else None
        if isinstance(found, (int, float)):
            return torch.tensor(float(found), dtype=_count_dtype())
        return found

    def empty_state(self, parameter: torch.Tensor, key: str) -> torch.Tensor:
        """A tensor on meta like the state that the first step will make; it begins with zeros."""
        if key == "step":
            return torch.empty((), dtype=_count_dtype(), device="meta")
        return torch.empty_like(parameter, device="meta", requires_grad=False)


def groups_of(name: str, optimizer: Optimizer) -> list[OptimizerGroup]:
    """The groups of an optimizer. Raises CaptureError where a graph cannot hold its step."""
    rule = RULES.get(type(optimizer))
    if rule is None:
        supported = ", ".join(cls.__name__ for cls in RULES)
        raise CaptureError(
            f"the optimizer {name!r} is a {type(optimizer).__qualname__}, whose step a graph does "
            f"not know; supported are torch.optim's {supported}"
        )
    if has_step_hooks(optimizer):
        raise CaptureError(
            f"the optimizer {name!r} has step hooks, which a graph cannot call; remove them, and "
            "write what they do into the step function"
        )
    return [
        _group(rule, name, optimizer, index, options)
        for index, options in enumerate(optimizer.param_groups)
    ]


def _group(
    rule: OptimizerRow, name: str, optimizer: Optimizer, index: int, options: Mapping[str, Any]
) -> OptimizerGroup:
    if options.get("differentiable"):
        raise CaptureError(
            f"the optimizer {name!r} is differentiable=True; a graph's step is not differentiated, "
            "so leave that out"
        )
    attrs = {key: _plain(options[key]) for key in rule.hyper_parameters}
    group = OptimizerGroup(optimizer, name, index, rule.op(options), attrs, rule.state(options))
    if attrs.get("dampening"):
        _check_dampening(group)
    return group


def _check_dampening(group: OptimizerGroup) -> None:
    """The first momentum is the gradient itself, not dampened: not what zeros lead to."""
    for key in group.state_names:
        if any(group.state_of(parameter, key) is None for parameter in group.parameters):
            raise CaptureError(
                f"the optimizer {group.name!r} has dampening and no momentum yet, and its first "
                "step follows another rule than the later ones; take one step with it before, or "
                "use dampening=0"
            )


def _plain(value: Any) -> Any:
    """A hyper-parameter as an attribute."""
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _count_dtype() -> torch.dtype:
    """The dtype in which torch counts steps."""
    wide = torch.get_default_dtype() == torch.float64
    return torch.float64 if wide else torch.float32
