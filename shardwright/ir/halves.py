"""Fused SGD of 16-bit floats on the CPU, in float32.

torch's kernel (seen in 2.13) loads the second half of each vector of 16-bit floats from the wrong
place: parameters of 16 elements or more get other values, and memory behind the momentum is read.
Here such tensors are widened, updated by the same kernel, and rounded once, as its other fused
optimizers do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwright.torch_internals import OpOverload

_HALVES = (torch.float16, torch.bfloat16)
_LISTS = 3
"""Parameters, gradients and momenta, the operator's first arguments and its results."""


def is_sgd(overload: OpOverload) -> bool:
    """Whether an operator is torch's fused SGD, in place or not."""
    return overload.namespace == "aten" and overload.overloadpacket in (
        torch.ops.aten._fused_sgd,
        torch.ops.aten._fused_sgd_,
    )


def widened(overload: OpOverload) -> Callable[..., Any]:
    """Fused SGD that is right for halves too. In place it writes what it was given."""
    in_place = overload.overloadpacket is torch.ops.aten._fused_sgd_

    def step(*args: Any, **kwargs: Any) -> Any:
        given: Sequence[list[torch.Tensor]] = args[:_LISTS]
        if not any(_is_wrong(tensor) for tensors in given for tensor in tensors):
            return overload(*args, **kwargs)
        wide = [[_wide(tensor) for tensor in tensors] for tensors in given]
        made = overload(*wide, *args[_LISTS:], **kwargs)
        results = wide if in_place else made
        pairs = [zip(news, olds, strict=True) for news, olds in zip(results, given, strict=True)]
        if not in_place:
            return tuple([new.to(old.dtype) for new, old in pair] for pair in pairs)
        for pair in pairs:
            for new, old in pair:
                if new is not old:
                    old.copy_(new)
        return None

    return step


def _is_wrong(tensor: torch.Tensor) -> bool:
    return tensor.dtype in _HALVES and tensor.device.type == "cpu"


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if _is_wrong(tensor) else tensor
