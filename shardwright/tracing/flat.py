"""A program as a function of flat tensors, which is all that a tracer has to understand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from shardwright.errors import CaptureError, InputError
from shardwright.ir.structure import Arguments, CallArguments, Tree, describe_result, rebuild_call
from shardwright.tracing.failures import explain

PREFIX = "model"
"""The attribute of the flat module that is the model: the first part of its modules' paths."""


class FlatModel(nn.Module):
    """A model that takes a call's tensors in leaf order and returns the result's, flat as well.

    They are followed by the new contents of buffers that the model assigned (``self.steps =
    self.steps + 1``), and by what a subclass returns besides. ``result`` is the result's structure
    and ``assigned`` the names of those buffers, known once ``forward`` has run. An exception of
    the model leaves ``forward`` as a CaptureError that names the model's line.
    """

    returns_tensors = True

    def __init__(self, model: nn.Module, arguments: Arguments) -> None:
        super().__init__()
        self.model = model
        self.arguments = arguments
        self.result: Tree | None = None
        self.assigned: tuple[str, ...] = ()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors of the result, then those of the buffers it assigned, then the rest."""
        call = rebuild_call(self.arguments, tensors)
        before = list(_stored(self.model))
        try:
            result = self.run(call)
        except CaptureError:
            raise
        except Exception as error:
            raise explain(error) from error
        self.result, outputs = _describe(result)
        if not outputs and self.returns_tensors:
            raise CaptureError(
                f"the model returned {type(result).__name__} without any tensor; a graph has at "
                "least one output"
            )
        assigned = {
            name: _assigned(name, holder.get(key), is_parameter=is_parameter)
            for name, holder, key, old, is_parameter in before
            if holder.get(key) is not old
        }
        self.assigned = tuple(assigned)
        return (*outputs, *assigned.values(), *self.rest())

    def run(self, call: CallArguments) -> Any:
        """What the program gives for a call."""
        return self.model(*call.args, **call.kwargs)

    def rest(self) -> Sequence[torch.Tensor]:
        """Tensors to return besides, once the program has run."""
        return ()


def _stored(
    model: nn.Module,
) -> Iterator[tuple[str, dict[str, torch.Tensor | None], str, torch.Tensor, bool]]:
    """Parameters and buffers: name, the table that holds it, its key there, tensor, which it is."""
    for prefix, module in model.named_modules():
        for holder in (module._parameters, module._buffers):
            for key, tensor in holder.items():
                if tensor is not None:
                    name = f"{prefix}.{key}" if prefix else key
                    yield name, holder, key, tensor, holder is module._parameters


def _assigned(name: str, tensor: torch.Tensor | None, *, is_parameter: bool) -> torch.Tensor:
    """The tensor that the model put in the place of a buffer."""
    if is_parameter:
        raise CaptureError(
            f"the model assigns its parameter {name!r} while it runs; parameters are fixed in "
            "a graph, so use a buffer, or compute with a new tensor"
        )
    if tensor is None:
        raise CaptureError(
            f"the model removes its buffer {name!r} while it runs; a graph cannot, so leave "
            "the buffer in place"
        )
    return tensor


def _describe(result: Any) -> tuple[Tree, list[torch.Tensor]]:
    try:
        return describe_result(result)
    except InputError as error:
        message = f"the model's result cannot be part of a graph: {error}"
        if "cache" in message.lower():
            message += " (to leave a cache out, call the model with use_cache=False)"
        raise CaptureError(message) from None


# --- tensors that hold others ---------------------------------------------------------------------
#
# A class of tensors that says what it holds by `__tensor_flatten__` and `__tensor_unflatten__`, as
# torchao's quantized weights do, is traced through: what it holds is stored, each under its
# attribute's name behind the tensor's, and what its own code computes with that is the graph.


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds others."""
    return hasattr(type(tensor), "__tensor_flatten__")


def check_wrapped(path: str, tensor: torch.Tensor, *, trained: bool = False) -> None:
    """Raise CaptureError for a tensor that holds others and cannot be made anew of others.

    Those of torch itself cannot here: what they hold is spread over processes, or of no one shape.
    Nor can any in a step that is ``trained``, whose gradients are of what is stored.
    """
    kind = type(tensor)
    if not is_wrapped(tensor):
        return
    if trained:
        why = "which a step of training does not take apart"
    elif not hasattr(kind, "__tensor_unflatten__") or kind.__module__.startswith("torch."):
        why = "and cannot be made of others (without __tensor_unflatten__, or one of torch's own)"
    else:
        return
    raise CaptureError(
        f"{path} is a {kind.__name__}, a tensor that holds several (quantized weights are such), "
        f"{why}; make them parameters of their own before, for a model of torchao by "
        "torchao.utils.unwrap_tensor_subclass(model)"
    )


def parts_of(path: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors that a tensor is made of, by path; itself where it is one."""
    if not is_wrapped(tensor):
        yield path, tensor
        return
    wrapped: Any = tensor
    for name in wrapped.__tensor_flatten__()[0]:
        yield from parts_of(f"{path}.{name}", getattr(tensor, name))


def with_parts(tensor: torch.Tensor, parts: Iterator[torch.Tensor]) -> torch.Tensor:
    """A tensor like this one that holds others, in the order of `parts_of`."""
    if not is_wrapped(tensor):
        return next(parts)
    wrapped: Any = tensor
    names, context = wrapped.__tensor_flatten__()
    inner = {name: with_parts(getattr(tensor, name), parts) for name in names}
    made: torch.Tensor = type(wrapped).__tensor_unflatten__(
        inner, context, tensor.shape, tensor.stride()
    )
    return made
