"""Operators that write: the tensor written to keeps its shape, dtype and strides."""

from typing import Any

import pytest
import torch

from shardwright.errors import CaptureError
from tests.tracing.equality import assert_same, captured


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 4, requires_grad=True)


def test_dtype_is_that_of_the_tensor_written_to(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        half = x.half()
        half.mul_(x)
        whole = torch.zeros(3, 4, dtype=torch.int64)
        whole.copy_(x * 10)
        whole.add_(True)
        return half, whole

    assert_same(function, x)


def test_copy_of_another_shape_and_layout(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        y = torch.empty(3, 4)
        y.copy_(x[0])
        z = torch.empty(4, 3)
        z.copy_(x.t())
        w = torch.empty(3, 4)
        w[:] = x
        return y, z, z.view(-1), w

    assert_same(function, x)


def test_strides_stay_those_of_the_tensor_written_to(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        y = m.linear(x).t().clone(memory_format=torch.preserve_format)
        flat = y.t().view(-1)
        y.copy_(x.t().contiguous())
        return y, flat

    assert_same(function, x)


def test_out_arguments(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        out = torch.empty(3, 4)
        torch.add(x.detach(), 1, out=out)
        row = out[0]
        torch.mul(out[1], 2, out=row)
        values, indices = torch.empty(3, 2), torch.empty(3, 2, dtype=torch.int64)
        torch.topk(out, 2, out=(values, indices))
        torch.zeros(4, out=out[2])
        return out, row, values, indices

    assert_same(function, x)


def test_indexed_writes(x: torch.Tensor) -> None:
    index = torch.tensor([2, 0])

    def function(m: Any, x: Any) -> Any:
        y = m.linear(x)
        y[index] = x[:2]
        y[y > 0.5] = 0
        y[:, index] += 1
        y.masked_fill_(y < -1, -1.0)
        y.index_add_(0, index, x[:2]).scatter_(1, index[:, None], 7.0)
        return y

    assert_same(function, x)


def test_lists_of_tensors(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        parts = [x.detach() * 1, x.detach() * 2]
        torch._foreach_add_(parts, 3)
        torch._foreach_mul_(parts, [x.detach(), x.detach()])
        return parts

    assert_same(function, x)


def test_shape_changes_in_place(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        y = m.linear(x)
        before = y.view(-1)
        y.unsqueeze_(0)
        y.transpose_(1, 2)
        y.mul_(2)
        z = y.squeeze_().t_()
        return before, y, z

    assert_same(function, x)


def test_what_has_no_functional_form_is_refused(x: torch.Tensor) -> None:
    with pytest.raises(CaptureError, match=r"fill_diagonal_.*functional form"):
        captured(lambda m, x: (x * 1).fill_diagonal_(1), x)
    with pytest.raises(CaptureError, match=r"resize_.*functional form"):
        captured(lambda m, x: (x.detach() * 1).resize_(2, 2), x)
    with pytest.raises(CaptureError, match="out="):
        captured(lambda m, x: torch.add(x.detach(), 1, out=torch.empty(0)), x)
