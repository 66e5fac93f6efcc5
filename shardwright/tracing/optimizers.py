"""Optimizers whose step a graph can hold, and what of them the step reads.

Comes in: an optimizer of torch. Goes out: for each parameter group a `OptimizerGroup`: the marker,
its hyper-parameters by torch's names, and the names of the state that a parameter has. What always
holds: the learning rate is no hyper-parameter; it is an input of the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from shardwright.errors import CaptureError
from shardwright.ops.optimizers import OPTIMIZERS, RECORDED
from shardwright.torch_internals import has_step_hooks


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
    marker_of = RECORDED.get(type(optimizer))
    if marker_of is None:
        supported = ", ".join(cls.__name__ for cls in RECORDED)
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
        _group(marker_of(options), name, optimizer, index, options)
        for index, options in enumerate(optimizer.param_groups)
    ]


def _group(
    op: str, name: str, optimizer: Optimizer, index: int, options: Mapping[str, Any]
) -> OptimizerGroup:
    if options.get("differentiable"):
        raise CaptureError(
            f"the optimizer {name!r} is differentiable=True; a graph's step is not differentiated, "
            "so leave that out"
        )
    row = OPTIMIZERS[op]
    attrs = {key: _plain(options[key]) for key in row.hyper_parameters}
    group = OptimizerGroup(optimizer, name, index, op, attrs, row.state(options))
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
