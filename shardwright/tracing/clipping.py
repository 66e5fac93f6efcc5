"""Clipping of gradients, seen from inside torch's own functions for it.

Comes in: calls of torch that ``clip_grad_norm_`` and ``clip_grad_value_`` make while a step is
recorded, wherever the step has these functions from. Goes out: which parameters they clip, and
how. What always holds: the functions themselves are not replaced, since that would be so for every
thread; they are told that no parameter has a gradient, and so have nothing to do.

    clip_grad_norm_(parameters, 1.0)
        enters no_grad                 begins: the arguments are on the stack
        asks for p.grad of each        None; noted
        makes the norm of nothing      the norm that the recorder makes
        leaves no_grad                 ends
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from shardwright.torch_internals import NO_GRAD_WRAPPER, SET_GRAD_ENABLED
from shardwright.tracing.origins import refuse_here
from shardwright.tracing.step_parameters import StepParameters

_DEPTH = 12  # frames between torch.no_grad at work and the function that it is around

Norm = Callable[[Sequence[torch.Tensor], float, float], torch.Tensor]
Value = Callable[[Sequence[torch.Tensor], float], None]


class Clipping:
    """What stands in for the calls that the clipping functions make; others go on to torch.

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
