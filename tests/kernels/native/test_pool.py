"""Native pools against torch's."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import ExecError
from tests.kernels.native.calls import native_call

LAST = torch.channels_last


def expected(x: torch.Tensor, attrs: dict, ceil: bool) -> torch.Tensor:
    if not attrs["mean"]:
        return torch.nn.functional.max_pool2d(
            x, attrs["kernel"], attrs["stride"], attrs["padding"], ceil_mode=ceil
        )
    return torch.nn.functional.avg_pool2d(
        x,
        attrs["kernel"],
        attrs["stride"],
        attrs["padding"],
        ceil_mode=ceil,
        count_include_pad=bool(attrs["count_padding"]),
    )


@st.composite
def pools(draw: st.DrawFn) -> tuple:
    kernel = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    attrs = {
        "kernel": kernel,
        "stride": draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
        "padding": tuple(draw(st.integers(0, size // 2)) for size in kernel),
        "mean": draw(st.integers(0, 1)),
        "count_padding": draw(st.integers(0, 1)),
    }
    shape = (draw(st.integers(1, 2)), draw(st.sampled_from([1, 3, 16, 35])))
    size = [draw(st.integers(k, 12)) for k in kernel]
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    x = torch.randn(*shape, *size, dtype=dtype)
    if draw(st.integers(0, 3)) == 0:
        x[0, 0, 0, size[1] // 2] = draw(st.sampled_from([math.nan, -math.inf, math.inf]))
    return x, attrs, *(draw(st.booleans()) for _ in range(3)), draw(st.sampled_from([1, 2]))


@settings(max_examples=200, deadline=None)
@given(pools())
def test_equals_torch(call: tuple) -> None:
    x, attrs, ceil, x_last, y_last, threads = call
    wanted = expected(x, attrs, ceil)
    x = x.to(memory_format=LAST) if x_last else x
    y = torch.full(wanted.shape, 77.0, dtype=x.dtype)
    y = y.to(memory_format=LAST) if y_last else y
    native_call("pool", attrs, [x], [y], threads=threads)
    tolerance = 1e-6 if attrs["mean"] else 0
    torch.testing.assert_close(y, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_large_pools_on_two_threads() -> None:
    x = torch.randn(4, 64, 40, 40)
    attrs = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1), "mean": 0, "count_padding": 0}
    for tensor in (x, x.to(memory_format=LAST)):
        y = torch.empty_like(expected(tensor, attrs, False))
        native_call("pool", attrs, [tensor], [y], threads=2)
        assert torch.equal(y, expected(tensor, attrs, False))


def test_what_is_refused() -> None:
    attrs = {"kernel": (1, 1), "stride": (1, 1), "padding": (0, 0), "mean": 0, "count_padding": 0}
    x = torch.zeros(1, 2, 3, 3)
    with pytest.raises(ExecError, match="f32"):
        native_call("pool", attrs, [x.half()], [x.half()])
    with pytest.raises(ExecError, match="two-dimensional"):
        native_call("pool", attrs, [x[0]], [x[0].clone()])
    with pytest.raises(ExecError, match="two numbers"):
        native_call("pool", {**attrs, "kernel": (1,)}, [x], [x.clone()])


@pytest.mark.parametrize(
    ("attrs", "y", "said"),
    [
        ({}, (1, 9, 2, 2), "other channels"),
        ({}, (2, 2, 2, 2), "another batch"),
        ({}, (2, 2, 2), "two-dimensional"),
        ({}, (1, 2, 3, 2), "height or width"),
        ({}, (1, 2, 2, 1), "height or width"),
        ({"kernel": (0, 2)}, (1, 2, 2, 2), "not sane"),
        ({"stride": (2, 0)}, (1, 2, 2, 2), "not sane"),
        ({"padding": (-1, 0)}, (1, 2, 1, 2), "not sane"),
        ({"padding": (2**40, 0)}, (1, 2, 1, 2), "not sane"),
    ],
)
def test_sizes_of_no_pool_are_refused(attrs: dict, y: tuple, said: str) -> None:
    x = torch.zeros(1, 2, 4, 4)
    alone = {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0), "mean": 0, "count_padding": 0}
    with pytest.raises(ExecError, match=said):
        native_call("pool", {**alone, **attrs}, [x], [torch.zeros(y)])
