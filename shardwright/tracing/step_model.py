"""What a step function closes over, as one module that can be traced.

Comes in: a `Closure`. Goes out: a `StepModel` that holds its models, its loose parameters and
the gradients that exist, and for each of these tensors the names it has in a graph. What always
holds: the one model with parameters keeps the names of its state_dict, so that a checkpoint fits;
where there are several, each has the name of its variable before its own.

    main     the one model with parameters            fc.weight
    beside   every other module, by variable          criterion.weight, generator.fc.weight
    loose    parameters that stand alone              scale
    warm     gradients that exist before the step     grad.fc.weight
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from shardwright.errors import CaptureError
from shardwright.torch_internals import has_backward_hooks, has_gradient_hooks
from shardwright.tracing.boundary import StoredTensor, contents_of
from shardwright.tracing.closures import Closure
from shardwright.tracing.flat import PREFIX
from shardwright.tracing.wrapped import check_wrapped

ROOTS = (f"{PREFIX}.main", f"{PREFIX}.beside")
"""The paths that stand before those of the program's own modules."""


class StepModel(nn.Module):
    """Holds a step's models and tensors.

    ``contents`` are its tensors by the path at which they stand here, and ``originals`` the
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
    """The name in a graph of what stands at a path of the `StepModel`."""
    return path.split(".", 1)[1]
