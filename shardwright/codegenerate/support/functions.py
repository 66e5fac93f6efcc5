"""Tensors with a backward of their own, as a `torch.autograd.Function` of the program gave them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class WithBackward(torch.autograd.Function):
    """The identity, with a backward of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        backward: Callable[..., Sequence[Tensor]],
        fills: bool,
        counts: tuple[int, int],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """The first of the tensors; then come those that get gradients, then what is saved."""
        made, inputs = counts
        ctx.function, ctx.counts = backward, counts
        ctx.set_materialize_grads(fills)
        ctx.save_for_backward(*tensors[made + inputs :])
        return tuple(tensor.view_as(tensor) for tensor in tensors[:made])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """What the function makes of the gradients and of what is saved."""
        if any(gradient is None for gradient in gradients):
            raise RuntimeError("the loss does not depend on all that the function returns")
        found = ctx.function(*gradients, *ctx.saved_tensors)
        made, saved = (None,) * ctx.counts[0], (None,) * len(ctx.saved_tensors)
        return (None, None, None, *made, *found, *saved)


def with_backward(
    backward: Callable[..., Sequence[Tensor]],
    made: Sequence[Tensor],
    inputs: Sequence[Tensor],
    saved: Sequence[Tensor] = (),
    *,
    fills: bool = True,
) -> tuple[Tensor, ...]:
    """``made``, whose gradients ``backward`` takes to ``inputs``; it reads ``saved`` too."""
    counts = (len(made), len(inputs))
    apply: Callable[..., tuple[Tensor, ...]] = WithBackward.apply
    return apply(backward, fills, counts, *made, *inputs, *saved)
