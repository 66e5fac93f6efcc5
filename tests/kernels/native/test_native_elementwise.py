"""Native add, bias_add, relu and its gradient against torch's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import ExecError
from tests.kernels.native.calls import native_call
from tests.kernels.native.tensors import FLOATS, broadcast, close, shapes, strided

TOLERANCE = {torch.float32: 2e-7, torch.float64: 1e-15, torch.int64: 0, torch.int32: 0}


@settings(deadline=None)
@given(st.data(), st.sampled_from([*TOLERANCE]), st.sampled_from([1.0, -1.0, 3.0, 0.5]))
def test_add(data: st.DataObject, dtype: torch.dtype, alpha: float) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    shape = data.draw(shapes())
    if not dtype.is_floating_point:
        alpha = round(alpha + 0.5)
    operands = data.draw(st.permutations([strided, broadcast]))
    a, b = (data.draw(st.composite(make)(shape, dtype)) for make in operands)
    y = data.draw(st.composite(strided)(shape, dtype))
    native_call("add", {"alpha": float(alpha)}, [a, b], [y])
    expected = torch.add(a, b, alpha=alpha).expand(shape)
    close(y, expected, TOLERANCE[dtype], least=10)


def test_add_refuses_what_it_cannot_do() -> None:
    whole = torch.ones(3, dtype=torch.int64)
    with pytest.raises(ExecError, match="whole numbers"):
        native_call("add", {}, [whole, torch.ones(3)], [torch.ones(3)])
    with pytest.raises(ExecError, match="alpha"):
        native_call("add", {"alpha": 0.5}, [whole, whole], [whole.clone()])
    with pytest.raises(ExecError, match="broadcast"):
        native_call("add", {}, [whole, whole], [torch.ones(4, dtype=torch.int64)])


@settings(deadline=None)
@given(st.data(), st.sampled_from(FLOATS))
def test_bias_add(data: st.DataObject, dtype: torch.dtype) -> None:
    shape = data.draw(shapes(least=1))
    x, y = (data.draw(st.composite(strided)(shape, dtype)) for _ in range(2))
    bias = data.draw(st.composite(strided)(shape[-1:], dtype))
    native_call("bias_add", {}, [x, bias], [y])
    assert torch.equal(y, x + bias)


@settings(deadline=None)
@given(st.data(), st.sampled_from(FLOATS), st.sampled_from([0.0, 0.5, -1.0]))
def test_relu_and_its_gradient(data: st.DataObject, dtype: torch.dtype, threshold: float) -> None:
    shape = data.draw(shapes())
    x, dy, y = (data.draw(st.composite(strided)(shape, dtype)) for _ in range(3))
    if x.numel():
        x[(0,) * x.dim()] = math.nan
    native_call("relu", {}, [x], [y])
    assert torch.equal(y.nan_to_num(9.0), x.relu().nan_to_num(9.0))
    native_call("relu_bwd", {"threshold": threshold}, [dy, x], [y])
    assert torch.equal(y, torch.ops.aten.threshold_backward(dy, x, threshold))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_in_place_and_threads(dtype: torch.dtype) -> None:
    a, b = (torch.randn(300, 500).mul(99).to(dtype) for _ in range(2))
    expected = a + b
    for threads in (1, 2):
        x = a.clone()
        native_call("add", {}, [x, b], [x], threads=threads)
        assert torch.equal(x, expected)
