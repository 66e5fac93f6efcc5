"""A function of tensors as a `torch.library` operator: its signature, kernels and backward.

What always holds: outputs share memory with no input and with no other output; arguments that are
lengths of identifiers are ints; on fake tensors the function itself is run.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.dimops.dimop import Dimop
from shardwright.errors import AnnotationError
from shardwright.ir.torch_internals import storage_key

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Signature:
    """A function's parameters: names of tensors, names of the rest, and which rest are lengths."""

    function: Function
    python: inspect.Signature
    tensors: tuple[str, ...]
    rest: tuple[str, ...]
    lengths: frozenset[str]

    @classmethod
    def of(cls, function: Function, dimop: Dimop) -> Signature:
        """Raises AnnotationError where types are missing or do not go with the annotation."""
        python = inspect.signature(function)
        hints = typing.get_type_hints(function)
        where = f"{function.__qualname__} of module {function.__module__}"
        missing = [name for name in (*python.parameters, "return") if name not in hints]
        if missing:
            raise AnnotationError(
                f"{where}: {', '.join(missing)} without a type; annotate every parameter and the "
                "result, as in (x: torch.Tensor, h: int) -> torch.Tensor"
            )
        tensors = tuple(name for name in python.parameters if hints[name] is torch.Tensor)
        rest = tuple(name for name in python.parameters if name not in tensors)
        if tuple(python.parameters)[: len(tensors)] != tensors:
            raise AnnotationError(f"{where}: {rest[0]} stands before a tensor; tensors come first")
        expected = [tensor for tensor in dimop.annotation.inputs if tensor.dims is not None]
        if len(tensors) != len(expected):
            raise AnnotationError(
                f"{where} takes {len(tensors)} tensors ({', '.join(tensors) or 'none'}), but "
                f"{str(dimop)!r} has {len(expected)} inputs"
            )
        lengths = frozenset(rest) & dimop.annotation.reductions().keys()
        parameters = [
            parameter.replace(annotation=int if name in lengths else hints[name])
            for name, parameter in python.parameters.items()
        ]
        typed = inspect.Signature(parameters, return_annotation=hints["return"])
        return cls(function, typed, tensors, rest, lengths)

    def whole_numbers(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments, with those that are lengths as ints."""
        return {
            name: int(value) if name in self.lengths and value == int(value) else value
            for name, value in arguments.items()
        }


def define(name: str, signature: Signature, backward: Function | None) -> Any:
    """The `torch.library` operator."""

    def compute(*args: Any) -> Any:
        return _without_aliases(signature.function(*args), args)

    compute.__signature__ = signature.python  # type: ignore[attr-defined]
    schema = torch.library.infer_schema(compute, mutates_args=())
    operator = torch.library.custom_op(name, compute, mutates_args=(), schema=schema)
    operator.register_fake(compute)
    gradients = backward or functools.partial(_rerun, signature)
    operator.register_autograd(
        functools.partial(_backward, signature, gradients), setup_context=_save
    )
    return operator


def _without_aliases(made: Any, args: Sequence[Any]) -> Any:
    """The outputs, copied where their memory is an input's or an earlier output's."""
    taken = {storage_key(arg) for arg in args if isinstance(arg, torch.Tensor)}

    def own(tensor: torch.Tensor) -> torch.Tensor:
        result = tensor.clone() if storage_key(tensor) in taken else tensor
        taken.add(storage_key(result))
        return result

    if isinstance(made, torch.Tensor):
        return own(made)
    return type(made)(own(tensor) for tensor in made)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep the arguments for the backward."""
    ctx.save_for_backward(*(item for item in inputs if isinstance(item, torch.Tensor)))
    ctx.rest = [item for item in inputs if not isinstance(item, torch.Tensor)]


def _backward(signature: Signature, gradients: Function, ctx: Any, *grads: Any) -> Any:
    """The gradient of each argument; None for what is no tensor."""
    given = grads[0] if len(grads) == 1 and isinstance(grads[0], (list, tuple)) else grads
    found = gradients(given, *ctx.saved_tensors, *ctx.rest)
    if found is None or isinstance(found, torch.Tensor):
        found = (found,)
    if len(found) != len(signature.tensors):
        raise AnnotationError(
            f"the backward of {signature.function.__qualname__} gives {len(found)} gradients; "
            f"expected one for each of {', '.join(signature.tensors)}"
        )
    return (*found, *[None] * len(signature.rest))


def _rerun(
    signature: Signature, grads: Sequence[torch.Tensor | None], *args: Any
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of the tensors by running the function again under autograd."""
    count = len(signature.tensors)
    tensors = [
        tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex())
        for tensor in args[:count]
    ]
    with torch.enable_grad():
        made = signature.function(*tensors, *args[count:])
    outputs = [made] if isinstance(made, torch.Tensor) else list(made)
    pairs = [
        (output, grad)
        for output, grad in zip(outputs, grads, strict=True)
        if grad is not None and output.requires_grad
    ]
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    if not pairs or not wanted:
        return (None,) * count
    found = iter(
        torch.autograd.grad(
            [output for output, _ in pairs],
            wanted,
            [grad for _, grad in pairs],
            allow_unused=True,
        )
    )
    return tuple(next(found) if tensor.requires_grad else None for tensor in tensors)
