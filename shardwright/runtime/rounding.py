"""rounding: whether this machine's matrix products depend on more than the numbers in them.

In comes nothing, out comes a `Rounding`: a few small products are made of the same numbers at other
places in memory and in other layouts, and held against one another. On most processors none
differs. On some, AMD's among them, MKL takes another kernel where an array begins at an odd address
or stands by columns, and so adds in another order: one program run twice, or a program and what was
made of it, then differ by rounding. The environment variable ``MKL_CBWR=AUTO``, set before torch is
imported, cures the first at no cost in speed, and leaves the second.

What always holds: no global generator is drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import linear

from shardwright.profiling.clock import computing_threads

SHAPES = ((3, 8, 8), (60, 64, 10))
"""Rows, terms and columns of products for which kernels were seen to differ."""
BOUNDARY = 16
"""Elements of float32 between the addresses at which torch lets arrays begin."""
TOLERANCES = (1e-7, 1e-6, 1e-5)
"""What is called rounding: so much of the largest value, at most."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """What a product's last bits depend on, beside its numbers."""

    by_alignment: bool
    by_layout: bool


@lru_cache(maxsize=1)
def rounding() -> Rounding:
    """Try products of float32 on the CPU, once a process; it takes two milliseconds."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False), computing_threads(1):
        return Rounding(
            by_alignment=_differs(lambda x: _placed(x, offset=1)),
            by_layout=_differs(lambda x: _placed(x.T).T) or _differs(lambda x: _placed(x, wider=8)),
        )


def remedy(largest: float, found: Rounding) -> str:
    """A line that says what to do about a difference of so much of the largest value.

    It is empty where the difference is more than rounding, or products are alike on this machine.
    """
    tolerance = next((bound for bound in TOLERANCES if largest <= bound), None)
    if tolerance is None or not (found.by_alignment or found.by_layout):
        return ""
    causes = ["where in memory their arrays lie"] if found.by_alignment else []
    causes += ["how their arrays are laid out"] if found.by_layout else []
    steps = ["set MKL_CBWR=AUTO before Python starts"] if found.by_alignment else []
    steps += [f"give tolerance={tolerance:g}"]
    between = ", and where that is not enough, " if found.by_layout else ", or "
    return (
        "\nThis is of the size of rounding, and here matrix products round by "
        f"{' and by '.join(causes)}: {between.join(steps)}"
    )


def _differs(place: Callable[[Tensor], Tensor]) -> bool:
    """Whether a product is another where one of its two matrices is placed otherwise."""
    return any(
        not torch.equal(linear(_placed(x), _placed(weight)), product)
        for x, weight in _matrices()
        for product in (linear(place(x), _placed(weight)), linear(_placed(x), place(weight)))
    )


def _matrices() -> Iterator[tuple[Tensor, Tensor]]:
    """What a linear layer multiplies, in each of `SHAPES`: numbers whose sums are rounded."""
    for rows, terms, columns in SHAPES:
        numbers = torch.arange(terms * (rows + columns), dtype=torch.float32, device="cpu").sin()
        x, weight = numbers.view(-1, terms).split([rows, columns])
        yield x, weight


def _placed(matrix: Tensor, *, offset: int = 0, wider: int = 0) -> Tensor:
    """A copy by rows, so many elements behind a boundary, its rows so much further apart."""
    rows, columns = matrix.shape
    pitch = columns + wider
    buffer = matrix.new_empty(BOUNDARY + offset + rows * pitch)
    begin = -buffer.data_ptr() // buffer.element_size() % BOUNDARY + offset
    return buffer.as_strided((rows, columns), (pitch, 1), begin).copy_(matrix)
