"""What a torch kernel is: attributes and tensors in, a call without arguments out.

A `Kernel` resolves everything ahead: the closure that it gives writes the outputs from the inputs
each time it is called, and looks nothing up. Operands that are not there are None. What always
holds: tensors need no gradient, outputs are written in place and keep their memory, and an output
may lie where the kind lets it lie in an input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwright.kernels.kinds import ACTIVATIONS

Tensors = Sequence[torch.Tensor | None]
Closure = Callable[[], object]
Kernel = Callable[[Mapping[str, Any], Tensors, Tensors], Closure]

_aten = torch.ops.aten


def present(tensors: Tensors) -> list[torch.Tensor]:
    """The operands that are there."""
    return [tensor for tensor in tensors if tensor is not None]


def needed(tensor: torch.Tensor | None) -> torch.Tensor:
    """An operand that the kind does not let be absent."""
    assert tensor is not None, "lowering gives every operand that a kind needs"
    return tensor


def store(made: Sequence[torch.Tensor | None], outs: Tensors) -> None:
    """Copies what a functional call made to where it belongs."""
    for tensor, out in zip(made, outs, strict=False):
        if out is not None and tensor is not None:
            out.copy_(tensor.reshape(out.shape))


def rows_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A matrix view with all but the last dimension as rows; None where it would be a copy."""
    try:
        return tensor.view(-1, tensor.shape[-1]) if tensor.numel() else None
    except RuntimeError:
        return None


_ACTIVATE: Mapping[str, Callable[[torch.Tensor], object]] = {
    "none": lambda y: y,
    "relu": torch.relu_,
    "gelu": lambda y: _aten.gelu.out(y, out=y),
    "gelu_tanh": lambda y: _aten.gelu.out(y, approximate="tanh", out=y),
    "silu": lambda y: _aten.silu.out(y, out=y),
    "tanh": torch.tanh_,
    "sigmoid": torch.sigmoid_,
}


def activation_of(number: int) -> Callable[[torch.Tensor], object] | None:
    """What applies an activation in place, by its number; None for none."""
    return _ACTIVATE[ACTIVATIONS[number]] if number else None
