"""Native sums over dimensions against torch's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import ExecError
from tests.kernels.native.calls import native_call
from tests.kernels.native.tensors import FLOATS, LOW, close, shapes, strided

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14, torch.float16: 1e-3, torch.bfloat16: 1e-2}
READ = [*FLOATS, torch.float32, *LOW, torch.bool, torch.int64, torch.int32]


@settings(deadline=None, max_examples=300)
@given(st.data(), st.sampled_from(READ), st.booleans(), st.sampled_from([1.0, 0.125, -3.0]))
def test_sums(data: st.DataObject, dtype: torch.dtype, keep: bool, scale: float) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    shape = data.draw(shapes())
    x = data.draw(st.composite(strided)(shape, dtype))
    low = -len(shape)
    some = st.lists(st.integers(low, -low - 1), unique_by=lambda d: d % len(shape), min_size=1)
    dims = data.draw(some) if shape else []
    store = dtype if dtype.is_floating_point else torch.float32
    expected = x.double().sum(dims, keepdim=keep) * scale
    y = data.draw(st.composite(strided)(expected.shape, store))
    native_call("reduce_sum", {"dims": dims, "scale": scale}, [x], [y])
    largest = x.double().abs().sum(dims).max().item() * abs(scale)
    close(y.double(), expected, TOLERANCE[store], least=largest if math.isfinite(largest) else 0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32])
def test_whole_numbers_are_summed_exactly(dtype: torch.dtype) -> None:
    x = torch.randint(0, 2**30, (37, 300)).to(dtype)
    for dims in ([0], [1], [0, 1], [-1]):
        expected = x.sum(dims)
        y = torch.empty_like(expected)
        native_call("reduce_sum", {"dims": dims, "scale": 1.0}, [x], [y])
        assert torch.equal(y, expected)


CASES = [((5000, 70), [0]), ((70, 5000), [1]), ((300_000,), [0]), ((30, 40, 50), [0, 2])]
CASES += [((2000, 3), [0]), ((600, 600), [0, 1])]


@pytest.mark.parametrize(("shape", "dims"), CASES)
def test_no_less_precise_than_torch_and_the_same_on_any_threads(
    shape: tuple[int, ...], dims: list[int]
) -> None:
    torch.manual_seed(0)
    x = torch.rand(shape)
    exact = x.double().sum(dims)
    found = []
    for threads in (1, 2, 3):
        y = torch.empty(exact.shape)
        native_call("reduce_sum", {"dims": dims, "scale": 1.0}, [x], [y], threads=threads)
        found.append(y)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    theirs = (x.sum(dims) - exact).abs().max()
    assert (found[0] - exact).abs().max() <= max(1.5 * theirs, 1e-7 * exact.abs().max())


def test_one_large_number_among_many_small_ones() -> None:
    x = torch.full((1_000_000,), 0.1)
    x[0] = 1e6
    y = torch.empty(())
    native_call("reduce_sum", {"dims": [0], "scale": 1.0}, [x], [y])
    assert y.item() == pytest.approx(x.double().sum().item(), rel=1e-6)


def test_nan_and_infinities() -> None:
    x = torch.ones(3, 50)
    x[0, 3], x[1, 7], x[2, 49] = math.nan, math.inf, -math.inf
    for source, dims in ((x, [1]), (x.t().contiguous().t(), [1]), (x, [0]), (x, [0, 1])):
        expected = source.sum(dims)
        y = torch.empty_like(expected)
        native_call("reduce_sum", {"dims": dims, "scale": 1.0}, [source], [y])
        torch.testing.assert_close(y, expected, equal_nan=True)


def test_what_is_refused() -> None:
    x, attrs = torch.ones(2, 3), {"dims": [1], "scale": 0.5}
    with pytest.raises(ExecError, match="shape"):
        native_call("reduce_sum", attrs, [x], [torch.ones(3)])
    with pytest.raises(ExecError, match="dtype"):
        native_call("reduce_sum", attrs, [x.long()], [torch.ones(2, dtype=torch.int64)])
