"""`shardwright::dropout`: dropout whose mask is a function of the element's place in the whole.

    dropout(Tensor x, float p, int seed, Tensor step, int site, int[] offsets, int[] whole_shape)

Of ``x``, the slice that begins at ``offsets`` of a tensor of ``whole_shape``, it makes the same
slice of the whole's dropout: zero where the element is dropped, else x / (1 - p). Which are
dropped follows from ``seed``, ``step`` (i64[1]: counts steps and microbatches), ``site`` (which
dropout of the program) and the element's place. So a split run drops what a whole one does, and a
backward need not keep the mask: it is the same operator on the gradient.

Every process that imports the package has the operator; no file has to require a module for it.

The random bits are Philox4x32-10 of "Parallel Random Numbers: As Easy as 1, 2, 3" (Salmon et al.,
2011): a counter and a key of 32-bit words are mixed to four random words, and nothing is kept from
one call to the next. Words are held in int64 tensors, so that a product of two fits: the same bits
on every device. Rows are all dimensions but the last; the four words of one counter belong to four
neighbours of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwright.errors import InputError

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


# --- random bits ----------------------------------------------------------------------------------

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Four random words for each counter; the counter's words (int64, < 2**32) are broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        a, b = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0 = ((b >> 32) ^ c1).bitwise_xor_(k0).bitwise_and_(WORD)
        c2 = ((a >> 32) ^ c3).bitwise_xor_(k1).bitwise_and_(WORD)
        c1, c3 = b, a  # their low words count; what is above goes with the mask of the next round
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return c0, c1 & WORD, c2, c3 & WORD


def words_below(
    limit: int,
    shape: Sequence[int],
    *,
    seed: int,
    stream: int,
    step: torch.Tensor,
    offsets: Sequence[int],
    whole_shape: Sequence[int],
) -> torch.Tensor:
    """Whether each element's word is below ``limit`` (0 to 2**32): bool of ``shape``.

    ``shape`` is that of a slice, which begins at ``offsets`` in a tensor of ``whole_shape``.
    ``step`` is one int64, on the device of the result; seed and stream are taken modulo 2**64 and
    2**32.
    """
    *above, columns = shape or (1,)
    first = offsets[-1] if shape else 0
    device = step.device
    blocks = torch.arange(first // 4, (first + columns + 3) // 4, device=device)
    rows = _rows(above, offsets[:-1], whole_shape[:-1], device)
    found = torch.empty(len(rows), len(blocks), 4, dtype=torch.bool, device=device)
    count = max(1, _AT_ONCE.get(device.type, _MANY) // max(1, len(blocks)))
    key, ends = (
        (seed & WORD, stream & WORD),
        (step & WORD, torch.full_like(step, seed >> 32 & WORD)),
    )
    for some, out in zip(rows.split(count), found.split(count), strict=True):
        for lane, words in enumerate(philox((blocks, some[:, None], *ends), key)):
            torch.lt(words, limit, out=out[:, :, lane])
    begin = first % 4
    return found.flatten(1)[:, begin : begin + columns].reshape(shape)


_MANY = 1 << 22
_AT_ONCE = {"cpu": 1 << 15}
"""How many counters are worked on at once, by device type: on a CPU, what its cache holds."""


def _rows(
    shape: Sequence[int], offsets: Sequence[int], whole: Sequence[int], device: torch.device
) -> torch.Tensor:
    """The numbers of a slice's rows among those of the whole."""
    numbers = torch.zeros(1, dtype=torch.int64, device=device)
    for size, offset, length in zip(shape, offsets, whole, strict=True):
        here = torch.arange(offset, offset + size, device=device)
        numbers = (numbers[:, None] * length + here).flatten()
    return numbers
