"""What a step function closes over, as one module that can be traced, and its gradients.

The one model with parameters keeps the names of its state_dict, so that a checkpoint fits; where
there are several, each has the name of its variable before its own:

    main     the one model with parameters            fc.weight
    beside   every other module, by variable          criterion.weight, generator.fc.weight
    loose    parameters of no module              scale
    warm     gradients that exist before the step     grad.fc.weight
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn

from shardwright.errors import CaptureError
from shardwright.torch_internals import (
    has_backward_hooks,
    has_gradient_hooks,
    without_torch_function,
)
from shardwright.tracing.boundary import StoredTensor, contents_of
from shardwright.tracing.closures import Closure
from shardwright.tracing.flat import PREFIX, check_wrapped
from shardwright.tracing.origins import refuse_here

ROOTS = (f"{PREFIX}.main", f"{PREFIX}.beside")
"""The paths before those of the program's own modules."""


class StepModel(nn.Module):
    """Holds a step's models and tensors.

    ``contents`` are its tensors by their path here, and ``originals`` the
    program's parameters by their first names; ``constants`` are the names of other tensors by id.
    """

    def __init__(self, closure: Closure) -> None:
        super().__init__()
        self.beside, self.loose, self.warm = nn.Module(), nn.Module(), nn.Module()
        for module_name, module in closure.modules.items():
            _check_module(module_name, module)
        main = _main_module(closure.modules)
        for name, module in closure.modules.items():
            if name == main:
                self.main = module
            else:
                self.beside.add_module(_key(name), module)
        alone = {_key(name): item for name, item in _loose_parameters(closure, self).items()}
        for key, tensor in alone.items():
            self.loose.register_parameter(key, _as_parameter(tensor))
        self.contents = self._contents(alone)
        self.constants = {id(tensor): name for name, tensor in closure.tensors.items()}
        self.originals = dict(self._originals())
        self._check_names()
        self._add_gradients()

    def _contents(self, alone: Mapping[str, torch.Tensor]) -> dict[str, StoredTensor]:
        """Every stored tensor by its path in this module, with its names in a graph."""
        contents = contents_of(self)
        for stored in set(contents.values()):
            stored.names = [_name(path) for path in stored.names]
        for key, tensor in alone.items():
            contents[f"loose.{key}"].tensor = tensor
        return contents

    def _originals(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The program's parameters by their first names, in order, tied ones once."""
        for path, _ in self.named_parameters(remove_duplicate=False):
            stored = self.contents[path]
            yield stored.names[0], stored.tensor

    def _check_names(self) -> None:
        """No two tensors have one name."""
        owners: dict[str, StoredTensor] = {}
        for stored in self.contents.values():
            for name in stored.names:
                if owners.setdefault(name, stored) is not stored:
                    raise CaptureError(
                        f"the step uses two tensors that would both be named {name!r}; give the "
                        "variables that hold their modules other names"
                    )

    def _add_gradients(self) -> None:
        """Hold the gradients that exist, as state."""
        self._gradients: dict[str, StoredTensor] = {}
        for number, (name, tensor) in enumerate(self.originals.items()):
            _check_hooks(name, tensor)
            if tensor.grad is not None:
                self.warm.register_buffer(f"g{number}", tensor.grad)
                self._gradients[name] = StoredTensor(tensor.grad, [f"grad.{name}"], "state")
                self.contents[f"warm.g{number}"] = self._gradients[name]

    # --- while it is traced -----------------------------------------------------------------

    def stand_ins(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What is traced in place of each parameter, by name; a tied one once.

        Sets the stand-ins' gradients to those of the gradients that exist.
        """
        first: dict[str, nn.Parameter] = {}
        for path, parameter in list(self.named_parameters(remove_duplicate=False)):
            name = self.contents[path].names[0]
            if first.setdefault(name, parameter) is not parameter:
                holder, _, key = path.rpartition(".")
                self.get_submodule(holder)._parameters[key] = first[name]
        for number, (name, parameter) in enumerate(first.items()):
            parameter.grad = self.warm._buffers.get(f"g{number}")
            yield name, parameter

    def gradient_state(self, name: str) -> StoredTensor | None:
        """The gradient of a parameter that exists before the step."""
        return self._gradients.get(name)


def _check_module(name: str, module: nn.Module) -> None:
    """Refuse what acts on gradients behind the step's back, and tensors that hold several."""
    for path, tensor in (*module.named_parameters(), *module.named_buffers()):
        check_wrapped(f"{name}.{path}", tensor, trained=True)
    for path, part in module.named_modules():
        where = f"{name}.{path}" if path else name
        if isinstance(part, nn.parallel.DistributedDataParallel):
            raise CaptureError(
                f"{where} is a DistributedDataParallel, which sends gradients itself; let the step "
                f"use the module inside it ({where}.module), and split the data by the plan"
            )
        if has_backward_hooks(part):
            raise CaptureError(
                f"{where} has backward hooks, which a graph cannot call; remove them, and change "
                "p.grad after backward()"
            )


def _check_hooks(name: str, parameter: torch.Tensor) -> None:
    if has_gradient_hooks(parameter):
        raise CaptureError(
            f"parameter {name!r} has hooks on its gradient, which a graph cannot call; remove "
            "them, and change p.grad after backward()"
        )


def _main_module(modules: Mapping[str, nn.Module]) -> str | None:
    """The name of the one module with parameters; None where there are several."""
    trained = [name for name, module in modules.items() if any(True for _ in module.parameters())]
    return trained[0] if len(trained) == 1 else None


def _loose_parameters(closure: Closure, model: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that require a gradient, or that an optimizer has, and that no module holds."""
    held = {id(tensor) for tensor in model.parameters()}
    found = {
        name: tensor
        for name, tensor in closure.tensors.items()
        if tensor.requires_grad and tensor.is_leaf and id(tensor) not in held
    }
    held |= {id(tensor) for tensor in found.values()}
    for name, optimizer in closure.optimizers.items():
        for i, group in enumerate(optimizer.param_groups):
            for j, tensor in enumerate(group["params"]):
                if id(tensor) not in held:
                    held.add(id(tensor))
                    found[f"{name}.{i}.{j}"] = tensor
    return found


def _as_parameter(tensor: torch.Tensor) -> nn.Parameter:
    """The tensor, or a parameter that shares its contents."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    return nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)


def _key(name: str) -> str:
    return name.replace(".", "_")


def _name(path: str) -> str:
    """The name in a graph of what is at a path of the `StepModel`."""
    return path.split(".", 1)[1]


# --- gradients while a step is traced -------------------------------------------------------------
#
# They are noted on the tensors that are traced in place of the parameters. The gradients before the
# step and after it fit together, so that the graph is right for every step and not for the first
# alone; a step for which they cannot is refused.

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
