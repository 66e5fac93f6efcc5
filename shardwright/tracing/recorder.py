"""A step while it is traced: what it asks of autograd and of optimizers is noted, and not done.

Calls of ``backward``, ``zero_grad``, ``clip_grad_norm_``, ``optimizer.step`` and the like become
effects of the traced program. The program's own parameters, which it may reach by any way, are
replaced at every call of torch by what is traced in their place, so that nothing of the caller's
changes; and torch is as before when the step has run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.overrides import TorchFunctionMode

from shardwright.errors import CaptureError
from shardwright.ir.tensor_meta import torch_dtype
from shardwright.ir.values import IRValue
from shardwright.torch_internals import (
    BEGINS_RANGE,
    NO_GRAD_WRAPPER,
    SET_GRAD_ENABLED,
    never_compiled,
)
from shardwright.tracing.active import LiveGraph, tracing
from shardwright.tracing.closures import Closure
from shardwright.tracing.effects import (
    EFFECT,
    Effect,
    EffectEmitter,
    OptimizerGroup,
    OptionsBefore,
    groups_of,
)
from shardwright.tracing.origins import refuse_here
from shardwright.tracing.step_model import StepModel, StepParameters


class Recorder:
    """Records one run of a step function.

    ``recorded`` are the effects by number, ``scheduled`` the schedulers in the order of their
    steps.
    """

    def __init__(self, model: StepModel, closure: Closure) -> None:
        self.model = model
        self.parameters = StepParameters(model)
        self.recorded: list[Effect] = []
        self.scheduled: list[LRScheduler] = []
        self._closure = closure
        self._differentiates = self._updates = False
        self._groups: dict[int, list[OptimizerGroup]] = {}
        self._options = OptionsBefore(closure.optimizers)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, under torch.export, the step runs."""
        self.parameters.begin()
        with ExitStack() as stack:
            for replacement in self._replaced():
                stack.enter_context(replacement)
            stack.enter_context(tracing(LiveGraph("step", self._own_marker)))
            stack.enter_context(Replacing(self._functions(), self.parameters.stand_in))
            yield
        self.parameters.end()
        if changed := self._options.changed(*self._closure.optimizers):
            raise CaptureError(changed)

    @property
    def idle_optimizers(self) -> list[str]:
        """Optimizers by name, where the step computes gradients and takes no step with any."""
        return [*self._closure.optimizers] if self._differentiates and not self._updates else []

    def _replaced(self) -> Iterator[Any]:
        """Replacements in the objects that the step closes over."""
        for module in self.model.modules():
            yield replaced_attribute(module, "zero_grad", partial(self._zero_module, module))
        for name, optimizer in self._closure.optimizers.items():
            zero = partial(self._zero_optimizer, optimizer)
            yield replaced_attribute(optimizer, "zero_grad", zero)
            yield replaced_attribute(optimizer, "step", partial(self._step, name, optimizer))
        for scheduler in self._closure.schedulers.values():
            yield replaced_attribute(scheduler, "step", partial(self._schedule, scheduler))
        for name, scaler in self._closure.scalers.items():
            if scaler.is_enabled():
                yield replaced_attribute(scaler, "scale", _refusing(_SCALER.format(name=name)))

    def _functions(self) -> dict[Any, Callable[..., Any]]:
        """What is called in place of functions of torch."""
        gradient: Any = torch.Tensor.grad
        data: Any = torch.Tensor.data
        return {
            torch.Tensor.backward: self._backward,
            torch.autograd.backward: self._backward_of_several,
            gradient.__set__: self.parameters.set_gradient,
            gradient.__delete__: self.parameters.set_gradient,
            data.__get__: lambda tensor, *_: self.parameters.stand_in(tensor).detach(),
            BEGINS_RANGE: self._begin_range,
            **Clipping(self.parameters, self._clip_norm, self._clip_value).functions(),
            **{function: _refusing(advice) for function, advice in _REFUSED.items()},
            **{function: partial(_number, function) for function in _NUMBERS},
        }

    def _record(
        self, effect: Effect, reads: Sequence[torch.Tensor], like: Sequence[torch.Tensor] = ()
    ) -> list[torch.Tensor]:
        self.recorded.append(effect)
        made: list[torch.Tensor] = EFFECT(len(self.recorded) - 1, list(reads), list(like))
        return made

    # --- backward ---------------------------------------------------------------------------

    def _backward(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        _check_backward(loss, gradient, create_graph)
        parameters = self.parameters
        reached = parameters.reached(loss, None if inputs is None else _listed(inputs))
        existing = parameters.existing(reached)
        new = [name for name in reached if name not in set(existing)]
        given = [loss] if gradient is None else [loss, parameters.stand_in(gradient)]
        effect = partial(
            EffectEmitter.backward,
            parameters=reached,
            existing=existing,
            has_gradient=gradient is not None,
        )
        reads = given + parameters.gradients(existing)
        made = self._record(effect, reads, parameters.named(new))
        self._differentiates = True
        for name in existing:
            parameters.add(name)
        for name, tensor in zip(new, made, strict=True):
            parameters.make(name, tensor)

    def _backward_of_several(
        self,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        losses, gradients = _listed(tensors), _listed(grad_tensors)
        if len(losses) != 1:
            raise refuse_here("torch.autograd.backward of several tensors; add the losses up first")
        gradient = gradients[0] if gradients else None
        self._backward(losses[0], gradient, create_graph=create_graph, inputs=inputs)

    # --- gradients as a whole ---------------------------------------------------------------

    def _zero_optimizer(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        self._zero((p for group in optimizer.param_groups for p in group["params"]), set_to_none)

    def _zero_module(self, module: nn.Module, set_to_none: bool = True) -> None:
        self._zero(module.parameters(), set_to_none)

    def _zero(self, tensors: Iterable[torch.Tensor], set_to_none: bool) -> None:
        names = self.parameters.names_of(tensors)
        kept = [] if set_to_none else self.parameters.existing(names)
        effect = partial(EffectEmitter.zero_grad, parameters=names, set_to_none=set_to_none)
        self._record(effect, self.parameters.gradients(kept))
        self.parameters.clear(names, set_to_none=set_to_none)

    def _clip_norm(
        self, parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        names = self.parameters.asked(self.parameters.names_of(parameters))
        if not names:
            return torch.tensor(0.0)
        gradients = self.parameters.gradients(names)
        norm = torch.empty((), dtype=_common_dtype(gradients), device=gradients[0].device)
        attrs = {"max_norm": max_norm, "norm_type": norm_type}
        effect = partial(EffectEmitter.clip, op="clip_grad_norm", parameters=names, attrs=attrs)
        return self._record(effect, gradients, [norm])[0]

    def _clip_value(self, parameters: Sequence[torch.Tensor], clip_value: float) -> None:
        names = self.parameters.asked(self.parameters.names_of(parameters))
        if names:
            attrs = {"clip_value": clip_value}
            effect = partial(
                EffectEmitter.clip, op="clip_grad_value", parameters=names, attrs=attrs
            )
            self._record(effect, self.parameters.gradients(names))

    # --- optimizers and schedulers ----------------------------------------------------------

    def _step(
        self, name: str, optimizer: Optimizer, closure: Callable[[], Any] | None = None
    ) -> Any:
        """What an optimizer's ``step`` is while the step function is traced."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        before = len(self.recorded)
        for group in self._groups_of(name, optimizer):
            names = self.parameters.asked(self.parameters.names_of(group.parameters))
            if names:
                reads = self.parameters.named(names) + self.parameters.gradients(names)
                effect = partial(EffectEmitter.update, group=group, parameters=names)
                self._record(effect, reads)
                self._updates = True
        if len(self.recorded) == before:
            raise refuse_here(
                f"the step of the optimizer {name!r} finds no gradient, so that it changes "
                "nothing: call backward() before it"
            )
        return result

    def _groups_of(self, name: str, optimizer: Optimizer) -> list[OptimizerGroup]:
        """The optimizer's groups, the same objects each time."""
        if changed := self._options.changed(name):
            raise refuse_here(changed)
        if id(optimizer) not in self._groups:
            self._groups[id(optimizer)] = groups_of(name, optimizer)
        return self._groups[id(optimizer)]

    def _schedule(self, scheduler: LRScheduler, *args: Any, **kwargs: Any) -> None:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise refuse_here(
                "ReduceLROnPlateau looks at the contents of a tensor, of which there are none "
                "while a graph is made; call its step() between the steps"
            )
        self.scheduled.append(scheduler)

    def _begin_range(self, name: str, *args: Any) -> Any:
        """A range of the profiler; one of an optimizer's is of one that the closure has not."""
        if name.startswith("Optimizer."):
            optimizer = name.partition("#")[2].partition(".")[0]
            raise refuse_here(
                f"the step calls a {optimizer} that it holds in no variable of its own, of its "
                "closure or of its module; make the optimizer before the step, and let the step "
                "name it"
            )
        return BEGINS_RANGE(name, *args)

    # --- what the program writes itself -----------------------------------------------------

    def _own_marker(
        self,
        op: str,
        attrs: dict[str, Any],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[IRValue],
    ) -> list[torch.Tensor]:
        like = [torch.empty(value.shape, dtype=torch_dtype(value.dtype)) for value in outputs]
        names = [value.name for value in outputs]
        effect = partial(EffectEmitter.own, op=op, attrs=attrs, names=names)
        return self._record(effect, list(map(self.parameters.stand_in, inputs)), like)


# --- what a step cannot do ------------------------------------------------------------------------


def _check_backward(loss: torch.Tensor, gradient: torch.Tensor | None, create_graph: bool) -> None:
    if create_graph:
        raise refuse_here("backward(create_graph=True) differentiates twice, which a graph cannot")
    if not loss.requires_grad:
        raise refuse_here("backward() of a tensor that does not depend on a parameter")
    if gradient is None and loss.numel() != 1:
        raise refuse_here(
            f"backward() of a tensor of shape {list(loss.shape)}; give it the gradient, or reduce "
            "the loss to one number"
        )


def _number(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a function that looks at contents gives, where there are some."""
    try:
        result = function(*args, **kwargs)
    except Exception:  # torch has many, and none that says what to do in a step
        result = None
    if not isinstance(result, (int, float, complex, str, list)):
        raise refuse_here(
            "a number is taken out of a tensor, and there are no numbers while a graph is made: "
            "return the tensor from the step, and print or log it after each step"
        )
    return result


def _refusing(message: str) -> Callable[..., Any]:
    """A function that does nothing but refuse."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise refuse_here(message)

    return refuse


_SCALER = (
    "the GradScaler {name!r} decides by the gradients' contents whether to update, and a graph has "
    "one path: train in bfloat16 (torch.autocast(..., dtype=torch.bfloat16)), which needs no scaler"
)
_REFUSED: dict[Any, str] = {
    torch.autograd.grad: "torch.autograd.grad cannot be part of a step; use backward() and p.grad",
    torch.Tensor.register_hook: (
        "a hook changes gradients while they are computed, which a graph cannot; change p.grad "
        "after backward()"
    ),
    torch.Tensor.retain_grad: (
        "a graph has gradients of parameters alone; make the tensor an nn.Parameter to have its own"
    ),
}
_NUMBERS: tuple[Any, ...] = (
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.__float__,
    torch.Tensor.__int__,
    torch.Tensor.__format__,
)
"""Functions that give a tensor's contents to Python."""


def _common_dtype(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """The floating-point dtype that torch promotes to; asking torch would be traced."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) == 1:
        return dtypes.pop()
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return [value] if isinstance(value, torch.Tensor) else list(value)


# --- clipping of gradients ------------------------------------------------------------------------
#
# It is seen from inside torch's own functions for it, wherever the step has these from. They are
# not replaced, since that would be so for every thread; they are told that no parameter has a
# gradient, and so have nothing to do.
#
#     clip_grad_norm_(parameters, 1.0)
#         enters no_grad                 begins: the arguments are on the stack
#         asks for p.grad of each        None; noted
#         makes the norm of nothing      the norm that the recorder makes
#         leaves no_grad                 ends

_DEPTH = 12  # frames between torch.no_grad at work and the function that it is around

Norm = Callable[[Sequence[torch.Tensor], float, float], torch.Tensor]
Value = Callable[[Sequence[torch.Tensor], float], None]


class Clipping:
    """What is called in place of what the clipping functions call; others go on to torch.

    ``norm`` records a clipping by norm and gives the norm, ``value`` one by value.
    """

    def __init__(self, parameters: StepParameters, norm: Norm, value: Value) -> None:
        self._parameters = parameters
        self._norm, self._value = norm, value
        self._call: FrameType | None = None
        self._clipped: list[torch.Tensor] = []

    def functions(self) -> dict[Any, Callable[..., Any]]:
        """The stand-ins by the functions of torch that they are called for."""
        gradient: Any = torch.Tensor.grad
        return {
            SET_GRAD_ENABLED: self._set_grad_enabled,
            gradient.__get__: self._gradient,
            torch.tensor: self._tensor,
        }

    def _set_grad_enabled(self, enabled: bool) -> None:
        call = _clipping_call(sys._getframe(1))
        if call is not None and self._call is None:
            self._begin(call)
        elif call is not None and call is self._call:
            self._end(call)
        SET_GRAD_ENABLED(enabled)

    def _begin(self, call: FrameType) -> None:
        if _arguments(call).get("error_if_nonfinite"):
            raise refuse_here(
                "clip_grad_norm_(error_if_nonfinite=True) looks at the norm's contents, of which "
                "there are none while a graph is made; leave it out"
            )
        self._call, self._clipped = call, []

    def _end(self, call: FrameType) -> None:
        self._call = None
        if _function(call) is _VALUE:
            self._value(self._clipped, float(_arguments(call)["clip_value"]))

    def _gradient(self, tensor: torch.Tensor, *_: Any) -> torch.Tensor | None:
        if self._call is None:
            return self._parameters.get_gradient(tensor)
        self._clipped.append(tensor)
        # The one by value does not work on nothing; this is something that nobody reads.
        is_first = len(self._clipped) <= 2 and self._clipped[0] is tensor
        return torch.zeros(()) if _function(self._call) is _VALUE and is_first else None

    def _tensor(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._call is None or _function(self._call) is not _NORM:
            return torch.tensor(*args, **kwargs)
        given = _arguments(self._call)
        return self._norm(
            self._clipped, float(given["max_norm"]), float(given.get("norm_type", 2.0))
        )


_NORM: Any = clip_grad_norm_.__wrapped__  # type: ignore[attr-defined]
_VALUE: Any = clip_grad_value_.__wrapped__  # type: ignore[attr-defined]


def _clipping_call(frame: FrameType | None) -> FrameType | None:
    """The frame of a clipping function whose no_grad is entered or left in ``frame``."""
    for _ in range(_DEPTH):
        if frame is None:
            return None
        if frame.f_code is NO_GRAD_WRAPPER:
            return frame if _function(frame) in (_NORM, _VALUE) else None
        frame = frame.f_back
    return None


def _function(call: FrameType) -> Any:
    return call.f_locals["func"]


def _arguments(call: FrameType) -> dict[str, Any]:
    """The arguments of a call by name."""
    names = _function(call).__code__.co_varnames
    return {**dict(zip(names, call.f_locals["args"], strict=False)), **call.f_locals["kwargs"]}


# --- replacing in one thread ----------------------------------------------------------------------
#
# Everything is as before when the block ends, however it ends.


class Replacing(TorchFunctionMode):
    """Calls ``replacements`` in place of functions of torch, and all others with stand-ins.

    ``stand_in`` gives for each tensor that reaches torch the one to use in its place.
    """

    def __init__(
        self,
        replacements: Mapping[Any, Callable[..., Any]],
        stand_in: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__()
        self._replacements = replacements
        self._stand_in = stand_in

    @never_compiled
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        replacement = self._replacements.get(func)
        if replacement is not None:
            return replacement(*args, **(kwargs or {}))
        return func(*self._replaced(args), **self._replaced(kwargs or {}))

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._stand_in(value)
        if type(value) in (list, tuple):
            return type(value)(map(self._replaced, value))
        if type(value) is dict:
            return {key: self._replaced(item) for key, item in value.items()}
        return value


@contextmanager
def replaced_attribute(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """An attribute of an object replaced, or put before its class's."""
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


_ABSENT = object()
