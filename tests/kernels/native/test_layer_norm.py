"""Native layer norm and its gradients against torch's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import ExecError
from tests.kernels.native.calls import native_call

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-14}
EPS = 1e-5


def close(found: torch.Tensor | None, expected: torch.Tensor, least: float = 0.0) -> None:
    """Within the dtype's tolerance of the greatest finite one, or of ``least``."""
    if found is None:
        return
    finite = expected.isfinite()
    torch.testing.assert_close(found[~finite], expected[~finite], equal_nan=True)
    if finite.any():
        atol = TOLERANCE[expected.dtype] * max(least, expected[finite].abs().max().item())
        torch.testing.assert_close(found[finite], expected[finite], rtol=0, atol=atol)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[torch.Tensor], list[int]]:
    """x, dy, and places for y and dx, of one shape, their rows anywhere; the normalized sizes."""
    torch.manual_seed(draw(st.integers(0, 99)))
    rows = draw(st.lists(st.integers(1, 6), max_size=2))
    size = st.one_of(st.integers(1, 5), st.integers(14, 140))
    sizes = draw(st.lists(size, min_size=1, max_size=2))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    found = []
    for _ in range(4):
        gaps = [draw(st.sampled_from([0, 0, 2])) for _ in rows]
        wide = torch.randn([*(n + g for n, g in zip(rows, gaps, strict=True)), *sizes], dtype=dtype)
        found.append(wide[tuple(slice(n) for n in rows)])
    return found, sizes


@settings(deadline=None)
@given(
    cases(),
    st.tuples(st.booleans(), st.booleans()),
    st.sampled_from([None, float("nan"), float("inf")]),
    st.floats(-100, 100),
)
def test_forward(
    case: tuple[list[torch.Tensor], list[int]],
    present: tuple[bool, bool],
    bad: float | None,
    far: float,
) -> None:
    (x, y, _, _), sizes = case
    x += far
    if bad is not None:
        x[(0,) * x.dim()] = bad
    weight, bias = (torch.randn(sizes, dtype=x.dtype) if there else None for there in present)
    expected = torch.ops.aten.native_layer_norm.default(x, sizes, weight, bias, EPS)
    mean, rstd = (torch.empty_like(t) for t in expected[1:])
    attrs = {"dims": len(sizes), "eps": EPS}
    native_call("layer_norm", attrs, [x, weight, bias], [y, mean, rstd])
    # Of an infinite row torch gives no mean, the kernel an infinite one.
    assert torch.equal(mean.isfinite(), expected[1].isfinite())
    well = mean.isfinite()
    close(mean[well], expected[1][well], 1 + abs(far))
    # What x's distance from 0 costs, both lose.
    steep = expected[2][well].max().item() if well.any() else 1.0
    close(rstd[well], expected[2][well], (1 + abs(far)) * steep**2)
    wide = [t if t is None else t.double() for t in (weight, bias)]
    exact = torch.layer_norm(x.double(), sizes, wide[0], wide[1], EPS).to(x.dtype)
    close(y, exact, (1 + abs(far)) * steep)
    native_call("layer_norm", attrs, [x, weight, bias], [y, None, None])


@settings(deadline=None)
@given(cases(), st.lists(st.booleans(), min_size=5, max_size=5))
def test_backward(case: tuple[list[torch.Tensor], list[int]], present: list[bool]) -> None:
    """Any of weight, bias, dx, dw, db absent."""
    (x, dy, dx, _), sizes = case
    weight = torch.randn(sizes, dtype=x.dtype) if present[0] else None
    bias = torch.randn(sizes, dtype=x.dtype) if present[1] else None
    _, mean, rstd = torch.ops.aten.native_layer_norm.default(x, sizes, weight, bias, EPS)
    # torch gives no gradient of an absent weight; the sums are the same with ones.
    expected = torch.ops.aten.native_layer_norm_backward.default(
        dy,
        x,
        sizes,
        mean,
        rstd,
        torch.ones(sizes, dtype=x.dtype) if weight is None else weight,
        torch.ones(sizes, dtype=x.dtype),
        [True, True, True],
    )
    made = [dx, torch.empty(sizes, dtype=x.dtype), torch.empty(sizes, dtype=x.dtype)]
    outputs = [t if there else None for t, there in zip(made, present[2:], strict=True)]
    inputs = [dy, x, mean, rstd, weight, bias]
    native_call("layer_norm_bwd", {"dims": len(sizes)}, inputs, outputs)
    # A row of few elements has gradients that cancel: what they are small against is rstd.
    least = (rstd.max() * dy.abs().max()).item()
    for found, wanted in zip(outputs, expected, strict=True):
        close(found, wanted, least)


@pytest.mark.parametrize(("rows", "n"), [(700, 128), (9, 20_000), (1001, 33)])
def test_threads_are_deterministic(rows: int, n: int) -> None:
    torch.manual_seed(0)
    x, dy = torch.randn(rows, n), torch.randn(rows, n)
    weight, bias = torch.randn(n), torch.randn(n)
    y, mean, rstd = torch.ops.aten.native_layer_norm.default(x, [n], weight, bias, EPS)
    expected = torch.ops.aten.native_layer_norm_backward.default(
        dy, x, [n], mean, rstd, weight, bias, [True, True, True]
    )
    for threads in (1, 2, 3):
        made = []
        for _ in range(2):
            outputs = [torch.empty_like(x), torch.empty(n), torch.empty(n)]
            inputs = [dy, x, mean, rstd, weight, bias]
            native_call("layer_norm_bwd", {"dims": 1}, inputs, outputs, threads=threads)
            made.append(outputs)
        for first, second, wanted in zip(*made, expected, strict=True):
            assert torch.equal(first, second)
            close(first, wanted)
        again = torch.empty_like(y)
        attrs = {"dims": 1, "eps": EPS}
        native_call("layer_norm", attrs, [x, weight, bias], [again, None, None], threads=threads)
        close(again, y)


def test_a_long_row_far_from_zero_keeps_its_deviation() -> None:
    x = torch.randn(1, 300_000) * 1e-2 + 10
    y, rstd = torch.empty_like(x), torch.empty(1, 1)
    native_call("layer_norm", {"dims": 1, "eps": 0.0}, [x, None, None], [y, None, rstd])
    exact = 1 / x.double().std(correction=0)
    assert abs(rstd.double().item() - exact.item()) < 1e-4 * exact.item()


def test_a_result_may_lie_in_memory_of_an_input() -> None:
    x = torch.randn(5, 70)
    y, attrs = torch.empty_like(x), {"dims": 1, "eps": EPS}
    native_call("layer_norm", attrs, [x, None, None], [y, None, None])
    native_call("layer_norm", attrs, [x, None, None], [x, None, None])
    assert torch.equal(x, y)


def test_gradients_may_lie_in_memory_of_the_inputs() -> None:
    x, dy, weight = torch.randn(5, 70), torch.randn(5, 70), torch.randn(70)
    _, mean, rstd = torch.ops.aten.native_layer_norm.default(x, [70], weight, None, EPS)
    inputs = [dy, x, mean, rstd, weight, None]
    dx = torch.empty_like(x)
    native_call("layer_norm_bwd", {"dims": 1}, inputs, [dx, None, None])
    for place in (0, 1):
        taken = [t.clone() if i == place else t for i, t in enumerate(inputs) if t is not None]
        native_call("layer_norm_bwd", {"dims": 1}, [*taken, None], [taken[place], None, None])
        assert torch.equal(taken[place], dx)


@pytest.mark.parametrize(
    ("x", "dims", "why"),
    [
        (torch.zeros(4, 6).t(), 1, "apart"),
        (torch.zeros(6, 4), 3, "dimensions"),
        (torch.zeros(6, 4, dtype=torch.bfloat16), 1, "dtypes"),
    ],
)
def test_what_the_kernel_does_not_do_is_refused(x: torch.Tensor, dims: int, why: str) -> None:
    y = torch.empty(x.shape, dtype=x.dtype)
    with pytest.raises(ExecError, match=why):
        native_call("layer_norm", {"dims": dims, "eps": EPS}, [x, None, None], [y, None, None])
