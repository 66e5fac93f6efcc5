"""A step's parameters while it is traced, and what becomes of their gradients.

Comes in: the program's parameters, and what is traced in their place. Goes out: names
for either, and gradients, which are noted on the stand-ins alone. What always holds: the gradients
before the step and after it fit together, so that the graph is right for every step and not for
the first alone; a step for which they cannot is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch

from shardwright.errors import CaptureError
from shardwright.torch_internals import without_torch_function
from shardwright.tracing.origins import refuse_here
from shardwright.tracing.step_model import StepModel

First = Literal["asked", "made", "added", "replaced"]
"""What a step does first with a parameter's gradient: it looks whether there is one, it computes
one where there is none, it adds to the one there is, or it clears or sets it without looking."""


class StepParameters:
    """The parameters of one run of a step.

    Once it has run, ``left`` names those whose gradient the next step may read, and ``carried``
    those of them that had no gradient before the step.
    """

    def __init__(self, model: StepModel) -> None:
        self.left: list[str] = []
        self.carried: set[str] = set()
        self._model = model
        self._names = {id(tensor): name for name, tensor in model.originals.items()}
        self._stand_ins: dict[str, torch.Tensor] = {}
        self._first: dict[str, First] = {}

    def begin(self) -> None:
        """Take up the stand-ins, which are in place by now."""
        self._stand_ins = dict(self._model.stand_ins())
        self._names |= {id(tensor): name for name, tensor in self._stand_ins.items()}
        with without_torch_function():
            for stand_in in self._stand_ins.values():
                if stand_in.requires_grad:
                    stand_in.register_post_accumulate_grad_hook(_refuse_unseen_backward)

    def end(self) -> None:
        """Find out what is left. Raises CaptureError where the next step would go otherwise."""
        for name, parameter in self._stand_ins.items():
            existed = self._model.gradient_state(name) is not None
            exists = _gradient(parameter) is not None
            first = self._first.get(name)
            if first == "asked" and existed != exists:
                raise CaptureError(
                    _ANOTHER_PATH.format(name=name, now="one" if existed else "none")
                )
            if first == "made" and exists:
                self.carried.add(name)
            if existed or name in self.carried:
                self.left.append(name)

    # --- parameters -------------------------------------------------------------------------

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is traced in place of one of the program's parameters; any other tensor itself."""
        name = self._names.get(id(tensor))
        return tensor if name is None else self._stand_ins[name]

    def named(self, names: Iterable[str]) -> list[torch.Tensor]:
        """The stand-ins of these names."""
        return [self._stand_ins[name] for name in names]

    def names_of(self, tensors: Iterable[torch.Tensor]) -> list[str]:
        """The names of parameters, each once. Raises CaptureError where one is no parameter."""
        return list(dict.fromkeys(map(self._name_of, tensors)))

    def _name_of(self, tensor: torch.Tensor) -> str:
        name = self._names.get(id(tensor))
        if name is None:
            raise refuse_here(
                f"a tensor of shape {list(tensor.shape)} is treated as a parameter, but the step "
                "closes over no such parameter; hold its module in a variable of the step"
            )
        return name

    def reached(self, loss: torch.Tensor, inputs: Iterable[torch.Tensor] | None) -> list[str]:
        """Those that a loss depends on, and are among ``inputs``, in the order of the model's.

        Raises CaptureError where something else would get a gradient.
        """
        found = {self._names.get(id(leaf)) for leaf in _leaves(loss)}
        if inputs is not None:
            found &= set(self.names_of(inputs))
        if None in found:
            raise refuse_here(
                "backward() reaches a tensor that requires a gradient and is no parameter, such as "
                "an input; detach() it, or make it an nn.Parameter that the step closes over"
            )
        return [name for name in self._stand_ins if name in found]

    # --- gradients --------------------------------------------------------------------------

    def get_gradient(self, tensor: torch.Tensor, *_: Any) -> torch.Tensor | None:
        """``tensor.grad``."""
        tensor = self.stand_in(tensor)
        if (name := self._names.get(id(tensor))) is not None:
            self._first.setdefault(name, "asked")
        return _gradient(tensor)

    def set_gradient(self, tensor: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        """``tensor.grad = gradient``."""
        tensor = self.stand_in(tensor)
        if (name := self._names.get(id(tensor))) is not None:
            self._first.setdefault(name, "replaced")
        tensor.grad = gradient

    def existing(self, names: Iterable[str]) -> list[str]:
        """Those that have a gradient."""
        return [name for name in names if _gradient(self._stand_ins[name]) is not None]

    def asked(self, names: Iterable[str]) -> list[str]:
        """Those that have a gradient, where that decides what the step does."""
        names = list(names)
        for name in names:
            self._first.setdefault(name, "asked")
        return self.existing(names)

    def gradients(self, names: Iterable[str]) -> list[torch.Tensor]:
        """The gradients of parameters that have one."""
        found = map(_gradient, self.named(names))
        return [gradient for gradient in found if gradient is not None]

    def add(self, name: str) -> None:
        """A gradient is added to the one that a parameter has."""
        self._first.setdefault(name, "added")

    def make(self, name: str, gradient: torch.Tensor) -> None:
        """A parameter without gradient gets one."""
        self._first.setdefault(name, "made")
        self._stand_ins[name].grad = gradient

    def clear(self, names: Iterable[str], *, set_to_none: bool) -> None:
        """Gradients become None; zeros are written to them by who emits the marker."""
        for name in names:
            self._first.setdefault(name, "replaced")
            if set_to_none:
                self._stand_ins[name].grad = None


def _refuse_unseen_backward(parameter: torch.Tensor) -> None:
    raise refuse_here(
        "gradients are computed in a way that is not recorded: by torch.autograd.backward, which "
        "older releases of torch do not show; call loss.backward(), and where there are several, "
        "add the losses up first"
    )


_ANOTHER_PATH = (
    "the step looks at the gradient of {name!r} before it computes one; there is {now} before this "
    "step, but it will be otherwise before the next one, which so takes another path: call "
    "zero_grad() at the beginning or the end of the step, and once before compile_ir"
)


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """``tensor.grad``, without asking for it in the program's name."""
    with without_torch_function():
        return tensor.grad


def _leaves(loss: torch.Tensor) -> list[torch.Tensor]:
    """The tensors into which a backward of ``loss`` accumulates."""
    if loss.grad_fn is None:
        return [loss]
    found, seen, pending = [], {loss.grad_fn}, [loss.grad_fn]
    while pending:
        function = pending.pop()
        if hasattr(function, "variable"):
            found.append(function.variable)
        for following, _ in function.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return found
