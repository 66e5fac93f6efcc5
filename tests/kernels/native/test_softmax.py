"""Native softmax, log softmax and their gradients against torch's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import ExecError
from tests.kernels.native.calls import native_call

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14}


def close(found: torch.Tensor, expected: torch.Tensor, least: float = 1.0) -> None:
    """Within the dtype's tolerance of the greatest finite one; the others are the same.

    ``least`` is how large the terms are of which the elements are sums.
    """
    finite = expected.isfinite()
    torch.testing.assert_close(found[~finite], expected[~finite], equal_nan=True)
    if finite.any():
        scale = max(least, expected[finite].abs().max().item())
        atol = TOLERANCE[expected.dtype] * scale
        torch.testing.assert_close(found[finite], expected[finite], rtol=0, atol=atol)


def strided(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this shape whose dimensions lie in any order, with gaps or without."""
    order = draw(st.permutations(range(len(shape))))
    gaps = [draw(st.sampled_from([0, 0, 3])) for _ in shape]
    wide = torch.randn([shape[d] + gaps[d] for d in order], dtype=dtype) * 3
    back = [order.index(d) for d in range(len(shape))]
    return wide.permute(back)[tuple(slice(n) for n in shape)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, bool, list[torch.Tensor]]:
    """dim, log, and three tensors of one shape."""
    torch.manual_seed(draw(st.integers(0, 99)))
    size = st.one_of(st.integers(1, 5), st.integers(14, 70))
    shape = tuple(draw(st.lists(size, min_size=1, max_size=3)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    same = draw(st.booleans())
    first = strided(draw, shape, dtype)
    others = [first.clone() if same else strided(draw, shape, dtype) for _ in range(2)]
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    return dim, draw(st.booleans()), [first, *others]


@settings(deadline=None)
@given(cases(), st.sampled_from([None, float("nan"), float("inf"), -float("inf")]))
def test_forward(case: tuple[int, bool, list[torch.Tensor]], bad: float | None) -> None:
    dim, log, (x, y, _) = case
    if bad is not None:
        x[(0,) * x.dim()] = bad
    expected = (torch.log_softmax if log else torch.softmax)(x, dim)
    native_call("softmax", {"dim": dim, "log": log}, [x], [y])
    close(y, expected)
    native_call("softmax", {"dim": dim, "log": log}, [x], [x])
    close(x, expected)


@settings(deadline=None)
@given(cases(), st.integers(0, 1))
def test_backward(case: tuple[int, bool, list[torch.Tensor]], inside: int) -> None:
    """In memory of its own, then in dy's or y's."""
    dim, log, (dy, y, dx) = case
    y.copy_((torch.log_softmax if log else torch.softmax)(y, dim))
    name = "_log_softmax_backward_data" if log else "_softmax_backward_data"
    expected = getattr(torch.ops.aten, name).default(dy, y, dim, y.dtype)
    terms = dy.abs().sum(dim).max().item()
    native_call("softmax_bwd", {"dim": dim, "log": log}, [dy, y], [dx])
    close(dx, expected, terms)
    target = [dy, y][inside]
    native_call("softmax_bwd", {"dim": dim, "log": log}, [dy, y], [target])
    close(target, expected, terms)


def test_a_gradient_of_stride_0() -> None:
    """What the backward of a sum hands on."""
    y = torch.softmax(torch.randn(6, 33), 1)
    dy, dx = torch.tensor(2.0).expand(6, 33), torch.empty(6, 33)
    native_call("softmax_bwd", {"dim": 1, "log": 0}, [dy, y], [dx])
    assert dx.abs().max() < 1e-6


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(("shape", "dim"), [((300, 1000), 1), ((7, 90, 700), 1), ((90, 2000), 0)])
def test_threads_change_no_bit(shape: tuple[int, ...], dim: int, log: bool) -> None:
    x = torch.randn(shape)
    found = [torch.empty_like(x) for _ in range(3)]
    for threads, y in enumerate(found, 1):
        native_call("softmax", {"dim": dim, "log": log}, [x], [y], threads=threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    close(found[0], (torch.log_softmax if log else torch.softmax)(x, dim))


def test_a_line_of_large_numbers_does_not_overflow() -> None:
    x = torch.tensor([[3e38, 3e38, -3e38], [-1e4, -1e4 - 1, -3e38]])
    y = torch.empty_like(x)
    native_call("softmax", {"dim": 1, "log": 0}, [x], [y])
    close(y, torch.softmax(x, 1))
    native_call("softmax", {"dim": 1, "log": 1}, [x], [y])
    close(y, torch.log_softmax(x, 1))


def test_other_dtypes_and_shapes_are_refused() -> None:
    x = torch.zeros(3, 4)
    with pytest.raises(ExecError, match="dtypes"):
        native_call("softmax", {"dim": 1, "log": 0}, [x], [x.half()])
    with pytest.raises(ExecError, match="shapes"):
        native_call("softmax", {"dim": 1, "log": 0}, [x], [x.t()])
    with pytest.raises(ExecError, match="dimension"):
        native_call("softmax", {"dim": 2, "log": 0}, [x], [x])
