"""Tensors that hold others, as torchao makes quantized weights: what they hold.

A class that says so by `__tensor_flatten__` and `__tensor_unflatten__` is traced through: what it
holds is stored, each under its attribute's name behind the tensor's, and what its own code computes
with that is the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shardwright.errors import CaptureError


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
