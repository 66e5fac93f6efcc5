"""Tensors of any strides for tests of native kernels, and how near results must be."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

SIZES = st.one_of(st.integers(1, 5), st.integers(14, 70))
FLOATS = [torch.float32, torch.float64]
LOW = [torch.float16, torch.bfloat16]
WHOLE = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


def shapes(least: int = 0, most: int = 4) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of few thousand elements at most, none of them empty."""
    lists = st.lists(SIZES, min_size=least, max_size=most).map(tuple)
    return lists.filter(lambda shape: torch.Size(shape).numel() <= 40_000)


def strided(draw: st.DrawFn, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose dimensions lie in any order, with gaps or without; about a fifth is 0."""
    order = draw(st.permutations(range(len(shape))))
    gaps = [draw(st.sampled_from([0, 0, 0, 3])) for _ in shape]
    wide = numbers([shape[d] + gap for d, gap in zip(order, gaps, strict=True)], dtype)
    back = [order.index(d) for d in range(len(shape))]
    return wide.permute(back)[tuple(slice(n) for n in shape)]


def numbers(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Small numbers that every dtype holds as it can; floats between them too."""
    values = torch.randn(list(shape)) * 2
    values = torch.where(torch.rand(list(shape)) < 0.2, 0.0, values)
    return (values.abs() if dtype == torch.uint8 else values).to(dtype)


def broadcast(draw: st.DrawFn, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor that broadcasts to ``shape``: sizes of 1, fewer dimensions, expanded ones."""
    kept = [1 if draw(st.integers(0, 3)) == 0 else size for size in shape]
    tensor = strided(draw, kept[draw(st.sampled_from([0, 0, len(kept) // 2])) :], dtype)
    return tensor.expand(tuple(shape)) if draw(st.integers(0, 4)) == 0 else tensor


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float, least: float = 0) -> None:
    """``max|a - b| <= tolerance * max|b|`` over finite elements; the others are the same.

    ``least`` is how large the terms are of which the elements are sums.
    """
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    found, expected = found.double(), expected.double()
    finite = expected.isfinite()
    torch.testing.assert_close(found[~finite], expected[~finite], equal_nan=True)
    if finite.any():
        limit = tolerance * max(expected[finite].abs().max().item(), least)
        error = (found[finite] - expected[finite]).abs().max().item()
        assert error <= limit, f"off by {error}, {limit} is allowed"
