"""The derivative of ``as_strided_scatter``, for which torch's own has only what was written.

torch gives the tensor that is written into the gradient of the elements that were overwritten, and
none of those that stayed; it is the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwright.errors import GraphError


class Scattered(torch.autograd.Function):
    """``as_strided_scatter`` of a contiguous tensor."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        src: torch.Tensor,
        size: Sequence[int],
        stride: Sequence[int],
        offset: int,
    ) -> torch.Tensor:
        """What is written into, then what is written and where."""
        if not x.is_contiguous():
            raise GraphError("it writes by strides into a tensor that is not contiguous")
        ctx.where = (size, stride, offset)
        return torch.as_strided_scatter(x, src, size, stride, offset)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """What was overwritten has no gradient; what was written has that of its place."""
        gradient = gradient.contiguous()
        written = torch.as_strided_copy(gradient, *ctx.where)
        stayed = torch.as_strided_scatter(gradient, torch.zeros_like(written), *ctx.where)
        return stayed, written, None, None, None
