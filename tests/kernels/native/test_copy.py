"""Native copy, fill and concat against torch's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import ExecError
from shardwright.ir.tensor_meta import DTYPES
from tests.kernels.native.calls import native_call
from tests.kernels.native.tensors import FLOATS, LOW, WHOLE, broadcast, shapes, strided

CONVERTED = [*FLOATS, *LOW, *WHOLE, torch.bool]


@settings(deadline=None, max_examples=300)
@given(st.data(), st.sampled_from(CONVERTED), st.booleans())
def test_copy(data: st.DataObject, dtype: torch.dtype, same: bool) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    shape = data.draw(shapes())
    store = dtype if same else data.draw(st.sampled_from(CONVERTED))
    x = data.draw(st.composite(broadcast)(shape, dtype))
    y = data.draw(st.composite(strided)(shape, store))
    native_call("copy", {}, [x], [y])
    source = x.abs() if store == torch.uint8 and dtype != torch.bool else x
    if store == torch.uint8 and (x < 0).any():
        return  # what a negative number becomes is not defined
    assert torch.equal(y, source.to(store).expand(shape))


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_every_dtype_is_moved(dtype: torch.dtype) -> None:
    x = torch.randn(37, 21).mul(9).to(dtype).t()
    y = torch.empty(21, 37, dtype=dtype)
    native_call("copy", {}, [x], [y])
    assert torch.equal(y.contiguous().view(torch.uint8), x.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 48), (33, 100), (5, 40, 7, 30), (3, 50), (2, 17, 16)])
@pytest.mark.parametrize("threads", [1, 2])
def test_transposes(dtype: torch.dtype, shape: tuple[int, ...], threads: int) -> None:
    x = torch.randn(shape).mul(100).to(dtype)
    for a in range(len(shape)):
        for b in range(a):
            turned = x.transpose(a, b)
            for y in (torch.empty(turned.shape, dtype=dtype), torch.zeros_like(turned)):
                native_call("copy", {}, [turned], [y], threads=threads)
                assert torch.equal(y, turned)


def test_special_numbers_are_converted_as_torch_does() -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1e-40, 65519.0, 65520.0, 3.39e38, -2.5])
    x = torch.cat([x, torch.randn(100) * 1000])
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.bool):
        y = torch.empty(x.shape, dtype=dtype)
        native_call("copy", {}, [x], [y])
        torch.testing.assert_close(y, x.to(dtype), rtol=0, atol=0, equal_nan=True)
    wide = x.double() * (1 + 1e-9)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        y = torch.empty(x.shape, dtype=dtype)
        native_call("copy", {}, [wide], [y])
        torch.testing.assert_close(y, wide.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_large_copies_are_shared_among_threads() -> None:
    x = torch.randn(300, 400)
    for threads in (1, 2, 3):
        for source in (x, x.t(), x[:, ::3], x[:1].expand(300, 400)):
            y = torch.empty(source.shape)
            native_call("copy", {}, [source], [y], threads=threads)
            assert torch.equal(y, source)


def test_copy_refuses_other_shapes_and_complex_numbers() -> None:
    with pytest.raises(ExecError, match="broadcast"):
        native_call("copy", {}, [torch.ones(3)], [torch.ones(4)])
    with pytest.raises(ExecError, match="dtypes"):
        native_call("copy", {}, [torch.ones(3)], [torch.ones(3, dtype=torch.complex64)])


@settings(deadline=None)
@given(st.data(), st.sampled_from(CONVERTED), st.sampled_from([0.0, 1.0, 3.0, 0.5]))
def test_fill(data: st.DataObject, dtype: torch.dtype, value: float) -> None:
    y = data.draw(st.composite(strided)(data.draw(shapes()), dtype))
    native_call("fill", {"value": value}, [], [y])
    assert torch.equal(y, torch.full_like(y, value))


@settings(deadline=None)
@given(st.data(), st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
def test_concat(data: st.DataObject, dtype: torch.dtype) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    shape = data.draw(shapes(least=1, most=3))
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    parts = []
    for size in data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4)):
        own = list(shape)
        own[dim] = size
        parts.append(data.draw(st.composite(strided)(own, dtype)))
    expected = torch.cat(parts, dim)
    y = data.draw(st.composite(strided)(expected.shape, dtype))
    native_call("concat", {"dim": dim}, parts, [y], threads=data.draw(st.sampled_from([1, 2])))
    assert torch.equal(y, expected)


def test_concat_refuses_what_does_not_fit() -> None:
    a = torch.ones(2, 3)
    for parts, dim in (([a], 0), ([a, torch.ones(2, 4)], 0), ([a, a.long()], 2), ([a[0], a], 0)):
        with pytest.raises(ExecError, match="concat"):
            native_call("concat", {"dim": dim}, parts, [torch.ones(4, 3)])
