"""Native dropout against the operator: the same elements are dropped, to the bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import ExecError
from tests.kernels.native.calls import native_call
from tests.kernels.native.tensors import FLOATS, strided

WORDS = st.one_of(st.integers(0, 9), st.integers(-(2**63), 2**63 - 1))


@settings(deadline=None, max_examples=200)
@given(st.data(), st.sampled_from(FLOATS))
def test_equals_the_operator(data: st.DataObject, dtype: torch.dtype) -> None:
    sizes = st.one_of(st.integers(1, 4), st.integers(14, 80))
    shape = tuple(data.draw(st.lists(sizes, max_size=3)))
    offsets = [data.draw(st.integers(0, 40)) for _ in shape]
    whole = [n + o + data.draw(st.integers(0, 9)) for n, o in zip(shape, offsets, strict=True)]
    p = data.draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0, 1e-10, 1 - 2**-40]))
    seed, site = data.draw(WORDS), data.draw(WORDS)
    step = torch.tensor([data.draw(WORDS)])
    x, y = (data.draw(st.composite(strided)(shape, dtype)) for _ in range(2))
    attrs = {"p": p, "seed": seed, "site": site, "offsets": offsets, "whole_shape": whole}
    native_call("dropout", attrs, [x, step], [y])
    expected = torch.ops.shardwright.dropout(x, p, seed, step, site, offsets, whole)
    assert torch.equal(y, expected)


def attributes(shape: list[int]) -> dict[str, object]:
    return {"p": 0.3, "seed": 5, "site": 2, "offsets": [0] * len(shape), "whole_shape": shape}


def test_threads_and_memory_of_the_input() -> None:
    x, step = torch.randn(200, 301), torch.tensor([7])
    expected = torch.ops.shardwright.dropout(x, 0.3, 5, step, 2, [0, 0], [200, 301])
    for threads in (1, 2, 3):
        y = x.clone()
        native_call("dropout", attributes([200, 301]), [y, step], [y], threads=threads)
        assert torch.equal(y, expected)


def test_what_is_dropped_is_zero_whatever_it_was() -> None:
    x, y = torch.full((1000,), math.nan), torch.empty(1000)
    native_call("dropout", attributes([1000]), [x, torch.tensor([1])], [y])
    assert 200 < (y == 0).sum() < 400


def test_what_is_refused() -> None:
    x, step = torch.ones(4), torch.tensor([1])
    with pytest.raises(ExecError, match="i64"):
        native_call("dropout", attributes([4]), [x, step.int()], [x.clone()])
    with pytest.raises(ExecError, match="f32 and f64"):
        native_call("dropout", attributes([4]), [x.half(), step], [x.half()])
    with pytest.raises(ExecError, match="fit"):
        native_call("dropout", attributes([4, 4]), [x, step], [x.clone()])
