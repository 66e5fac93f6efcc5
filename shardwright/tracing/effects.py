"""What a step of training does besides computing: backwards, optimizers' steps and the like.

While a step is traced each effect is a call of the operator `EFFECT`, whose number leads to the
function here that emits it. The operator computes nothing; it gives tensors like those that it is
told to, so that the program can go on with them. In the graph an effect is a marker node.
Parameters, gradients and state are values that never change; each marker makes new ones, and from
then on the program reads those:

    Backward         loss, [gradient]              -> a gradient a parameter
    zero_grad        nothing                       -> nothing
    clip_grad_norm   gradients                     -> the total norm, then clipped gradients
    clip_grad_value  gradients                     -> clipped gradients
    *_step           lr, parameters, gradients,    -> parameters, then each list of state
                     then each list of state
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.fx
from torch.optim import Optimizer

from shardwright.errors import CaptureError
from shardwright.ir.tensor_meta import dtype_name, torch_dtype
from shardwright.ir.values import IRValue
from shardwright.ops.optimizers import OPTIMIZERS, RECORDED
from shardwright.torch_internals import has_step_hooks
from shardwright.tracing.emitter import GraphEmitter
from shardwright.tracing.memory import ProgramMemory, TensorView

_LIBRARY = torch.library.Library("shardwright_step", "DEF")
_LIBRARY.define("effect(int number, Tensor[] reads, Tensor[] like) -> Tensor[]")


def _effect(
    number: int, reads: Sequence[torch.Tensor], like: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    return [torch.empty_like(tensor) for tensor in like]


torch.library.register_fake("shardwright_step::effect", _effect, lib=_LIBRARY)
_LIBRARY.impl("effect", torch.library.fallthrough_kernel, "Autograd")

EFFECT = torch.ops.shardwright_step.effect.default
torch.fx.node.has_side_effect(EFFECT)


# --- optimizers -----------------------------------------------------------------------------------
#
# The learning rate is no hyper-parameter; it is an input of the graph.


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
    attrs = hyper_parameters(op, options)
    state_names = OPTIMIZERS[op].state(options)
    group = OptimizerGroup(optimizer, name, index, op, attrs, state_names)
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


def hyper_parameters(op: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What a marker holds of a parameter group's options: constants of the graph."""
    return {key: _plain(options[key]) for key in OPTIMIZERS[op].hyper_parameters}


class OptionsBefore:
    """Copies of the options of optimizers, by name, to tell what a step sets of them."""

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._optimizers = optimizers
        self._before = {
            name: [dict(group) for group in optimizer.param_groups]
            for name, optimizer in optimizers.items()
        }

    def changed(self, *names: str) -> str | None:
        """The first option of these optimizers that is another now, as an error says it."""
        for name in names:
            now, before = self._optimizers[name].param_groups, self._before[name]
            if len(now) != len(before):
                return f"the step adds parameter groups to {name!r}: add them before the step"
            for index, (group, options) in enumerate(zip(now, before, strict=True)):
                if changed := _changed(name, index, group, options):
                    return changed
        return None


def _changed(
    name: str, index: int, group: Mapping[str, Any], before: Mapping[str, Any]
) -> str | None:
    if _differs(group["lr"], before["lr"]):
        return (
            f"the step sets the learning rate of {name!r}, which is an input of the graph: "
            "give it for each step from outside, or use a torch.optim.lr_scheduler"
        )
    keys = {key for row in OPTIMIZERS.values() for key in row.hyper_parameters}
    for key in sorted(keys & before.keys()):
        if _differs(group[key], before[key]):
            return (
                f"the step sets {key!r} of parameter group {index} of {name!r} from "
                f"{before[key]} to {group[key]}, and the graph holds it as a constant: leave it "
                "as it is"
            )
    return None


def _differs(value: Any, before: Any) -> bool:
    """Whether an option is another; of tensors whether it is another tensor."""
    return value is not before and (isinstance(value, torch.Tensor) or value != before)


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


# --- emitting -------------------------------------------------------------------------------------


class RateInput(NamedTuple):
    """The learning rate of a group, as an input of the graph."""

    input: str
    group: OptimizerGroup
    value: IRValue


class EffectEmitter:
    """Emits effects as markers.

    ``recorded`` are the effects by number, ``originals`` the program's parameters by name, and
    ``carried`` those whose gradient is left for the next step to add to, though there was none
    before this one. ``rates`` are the learning rates read, in the order of first use, and
    ``gradients`` the states in which carried gradients begin.
    """

    def __init__(
        self,
        emitter: GraphEmitter,
        memory: ProgramMemory,
        recorded: Sequence[Effect],
        originals: Mapping[str, torch.Tensor],
        carried: Collection[str],
    ) -> None:
        self.rates: list[RateInput] = []
        self.gradients: dict[str, IRValue] = {}
        self._emitter = emitter
        self._memory = memory
        self._recorded = recorded
        self._originals = originals
        self._carried = set(carried)
        self._state: dict[tuple[int, str, str], tuple[IRValue, IRValue]] = {}
        self._zeros: set[int] = set()

    def emit(
        self, number: int, reads: list[TensorView], specs: Sequence[torch.Tensor]
    ) -> list[TensorView]:
        """Emit an effect; gives the tensors that it makes, of which ``specs`` are fakes."""
        return self._recorded[number](self, reads, specs)

    def updates(self) -> dict[int, int]:
        """State of optimizers to what replaces it."""
        return {old.id: new.id for old, new in self._state.values()}

    # --- effects ----------------------------------------------------------------------------

    def backward(
        self,
        reads: list[TensorView],
        specs: Sequence[torch.Tensor],
        *,
        parameters: Sequence[str],
        existing: Sequence[str],
        has_gradient: bool,
    ) -> list[TensorView]:
        """Reads the loss, the gradient it is given if any, and the gradients that exist already.

        ``parameters`` get a gradient, ``existing`` of them had one, and the others' are made.
        """
        count = 1 + has_gradient
        given, old = reads[:count], dict(zip(existing, reads[count:], strict=True))
        self._memory.differentiated = True
        before = {name: self._existing(name, old.get(name)) for name in parameters}
        accumulate = any(value is not None for value in before.values())
        made = self._marker(
            "Backward",
            [self._memory.read(tensor) for tensor in given],
            {"parameters": list(parameters), "accumulate": accumulate},
            [self._like(f"grad.{name}", self._originals[name]) for name in parameters],
        )
        new: list[IRValue] = []
        for name, value in zip(parameters, made, strict=True):
            earlier = before[name]
            if earlier is not None:
                value = self._emitter.one("aten.add.Tensor", earlier, value)
            if name in old:
                self._memory.write(old[name], value)
            else:
                new.append(value)
        return self._roots(specs, new)

    def zero_grad(
        self,
        reads: list[TensorView],
        specs: Sequence[torch.Tensor],
        *,
        parameters: Sequence[str],
        set_to_none: bool,
    ) -> list[TensorView]:
        """Reads the gradients that become zeros; none where they become None."""
        attrs = {"parameters": list(parameters), "set_to_none": set_to_none}
        self._marker("zero_grad", [], attrs, [])
        for tensor in reads:
            zeros = self.zeros_like(tensor.value)
            self._zeros.add(zeros.id)
            self._memory.write(tensor, zeros)
        return []

    def clip(
        self,
        reads: list[TensorView],
        specs: Sequence[torch.Tensor],
        *,
        op: str,
        parameters: Sequence[str],
        attrs: dict[str, Any],
    ) -> list[TensorView]:
        """Reads gradients, which are clipped in place; makes their total norm where asked for."""
        values = [self._memory.read(tensor) for tensor in reads]
        outputs = [self._like("total_norm", spec) for spec in specs]
        for value, name in zip(values, parameters, strict=True):
            outputs.append(self._same(value, f"grad.{name}"))
        made = self._marker(op, values, attrs, outputs)
        for tensor, value in zip(reads, made[len(specs) :], strict=True):
            self._memory.write(tensor, value)
        return self._roots(specs, made[: len(specs)])

    def update(
        self,
        reads: list[TensorView],
        specs: Sequence[torch.Tensor],
        *,
        group: OptimizerGroup,
        parameters: Sequence[str],
    ) -> list[TensorView]:
        """An optimizer's step for one group: reads parameters, then their gradients."""
        names, count = parameters, len(parameters)
        values = [self._memory.read(tensor) for tensor in reads]
        keys = [(id(group.optimizer), name, key) for key in group.state_names for name in names]
        state = [self._state_of(group, name, key) for _, name, key in keys]
        made = self._marker(
            group.op,
            [self._rate(group), *values, *state],
            {"parameters": list(names), **group.attrs},
            [self._same(value, f"new.{value.name}") for value in (*values[:count], *state)],
        )
        for tensor, value in zip(reads[:count], made[:count], strict=True):
            self._memory.replace(tensor, value)
        for where, value in zip(keys, made[count:], strict=True):
            self._state[where] = (self._state[where][0], value)
        return []

    def own(
        self,
        reads: list[TensorView],
        specs: Sequence[torch.Tensor],
        *,
        op: str,
        attrs: dict[str, Any],
        names: Sequence[str],
    ) -> list[TensorView]:
        """A marker that the program writes itself (`active`); makes tensors under these names."""
        inputs = [self._memory.read(tensor) for tensor in reads]
        outputs = [self._like(name, spec) for name, spec in zip(names, specs, strict=True)]
        return self._roots(specs, self._marker(op, inputs, attrs, outputs))

    # --- what they read ---------------------------------------------------------------------

    def _existing(self, name: str, tensor: TensorView | None) -> IRValue | None:
        """What a new gradient is added to; None where that is nothing, or zeros."""
        if tensor is not None:
            value = self._memory.read(tensor)
            return None if value.id in self._zeros else value
        if name in self._carried:
            self._carried.remove(name)
            spec = torch.empty_like(self._originals[name], device="meta", requires_grad=False)
            self.gradients[name] = self._emitter.builder.zeros("state", f"grad.{name}", spec)
            return self.gradients[name]
        return None

    def _rate(self, group: OptimizerGroup) -> IRValue:
        """The input with the learning rate of a group."""
        for rate in self.rates:
            if rate.group is group:
                return rate.value
        name = f"lr_{len(self.rates)}" if self.rates else "lr"
        value = self._emitter.builder.input(name, (), "f64")
        self.rates.append(RateInput(name, group, value))
        return value

    def _state_of(self, group: OptimizerGroup, name: str, key: str) -> IRValue:
        """The optimizer's state of a parameter at this point, begun where it is read first."""
        where = (id(group.optimizer), name, key)
        if where not in self._state:
            parameter = self._originals[name]
            label = f"optimizer.{name}.{key}"
            contents = group.state_of(parameter, key)
            if contents is not None:
                value = self._emitter.builder.state(label, contents)
            else:
                empty = group.empty_state(parameter, key)
                value = self._emitter.builder.zeros("state", label, empty)
            self._state[where] = (value, value)
        return self._state[where][1]

    # --- what they make ---------------------------------------------------------------------

    def _marker(
        self, op: str, inputs: Sequence[IRValue], attrs: dict[str, Any], outputs: list[IRValue]
    ) -> list[IRValue]:
        scopes, source = self._emitter.scopes, self._emitter.source
        self._emitter.builder.emit(op, inputs, attrs, outputs=outputs, scopes=scopes, source=source)
        return outputs

    def _roots(self, specs: Sequence[torch.Tensor], values: Sequence[IRValue]) -> list[TensorView]:
        return [self._memory.root(spec, v) for spec, v in zip(specs, values, strict=True)]

    def _like(self, name: str, tensor: torch.Tensor) -> IRValue:
        """A value to be made, of a tensor's kind."""
        return self._emitter.builder.value(
            name, tensor.shape, dtype_name(tensor.dtype), strides=tensor.stride()
        )

    def _same(self, value: IRValue, name: str) -> IRValue:
        """A value to be made, of another value's kind."""
        return self._emitter.builder.value(
            name, value.shape, value.dtype, strides=value.strides, device=value.device
        )

    def zeros_like(self, value: IRValue) -> IRValue:
        """Zeros of a value's shape and dtype."""
        return self._emitter.one(
            "aten.zeros.default", list(value.shape), dtype=torch_dtype(value.dtype)
        )


Effect = Callable[[EffectEmitter, list[TensorView], Sequence[torch.Tensor]], list[TensorView]]
"""A method of `EffectEmitter` with its keywords bound."""
