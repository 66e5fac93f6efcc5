"""`shardwright::dropout`: dropout whose mask is a function of the element's place in the whole.

    dropout(Tensor x, float p, int seed, Tensor step, int site, int[] offsets, int[] whole_shape)

Comes in: ``x``, the slice that begins at ``offsets`` of a tensor of ``whole_shape``. Goes out: the
same slice of the whole's dropout: zero where the element is dropped, else x / (1 - p). Which are
dropped follows from ``seed``, ``step`` (i64[1]: counts steps and microbatches), ``site`` (which
dropout of the program) and the element's place. So a split run drops what a whole one does, and a
backward need not keep the mask: it is the same operator on the gradient.

Every process that imports the package has the operator; no file has to require a module for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwright.errors import InputError
from shardwright.ir.philox import words_below

DROPOUT = "shardwright.dropout.default"
"""The operator's full name in a graph."""


@torch.library.custom_op("shardwright::dropout", mutates_args=())
def dropout(
    x: torch.Tensor,
    p: float,
    seed: int,
    step: torch.Tensor,
    site: int,
    offsets: Sequence[int],
    whole_shape: Sequence[int],
) -> torch.Tensor:
    """Dropout of a slice. Raises InputError where the slice is not inside the whole."""
    _check(x, p, step, offsets, whole_shape)
    if p == 1:
        return torch.zeros_like(x)
    dropped = words_below(
        round(p * 2**32),
        x.shape,
        seed=seed,
        stream=site,
        step=step,
        offsets=offsets,
        whole_shape=whole_shape,
    )
    return (x * (1 / (1 - p))).masked_fill_(dropped, 0)


def _check(
    x: torch.Tensor, p: float, step: torch.Tensor, offsets: Sequence[int], whole: Sequence[int]
) -> None:
    fits = len(offsets) == len(whole) == x.dim() and all(
        start >= 0 and start + size <= length
        for start, size, length in zip(offsets, x.shape, whole, strict=True)
    )
    if not fits:
        raise InputError(
            f"dropout of a slice of shape {list(x.shape)} at {list(offsets)} of a tensor of shape "
            f"{list(whole)}: the slice is not inside"
        )
    if not (0 <= p <= 1 and x.is_floating_point()):
        raise InputError(f"dropout with p={p} of {x.dtype}; p is from 0 to 1, and x is of floats")
    if step.shape != (1,) or step.dtype != torch.int64:
        raise InputError(
            f"dropout with a step of {step.dtype}{list(step.shape)}; expected one torch.int64, [1]"
        )


@dropout.register_fake
def _fake(x: torch.Tensor, *others: Any) -> torch.Tensor:
    return x * 1.0


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, p, seed, step, *where = inputs
    ctx.save_for_backward(step)
    ctx.before, ctx.after = (p, seed), where


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (step,) = ctx.saved_tensors
    return dropout(gradient, *ctx.before, step, *ctx.after), *[None] * 6


dropout.register_autograd(_backward, setup_context=_keep)
