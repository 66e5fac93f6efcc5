"""Views: reading from what was written gives the part again, and leaves the rest alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwright.ir import resolve
from shardwright.ir.operators import split_call
from shardwright.tracing.memory import SAME, ViewCall, ViewOperator, ViewRow, describe_view

aten = torch.ops.aten
Make = Callable[[torch.Tensor], Any]

VIEWS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "view": (aten.view.default, ([4, 6],)),
    "reshape": (aten.reshape.default, ([-1],)),
    "flatten": (aten.flatten.using_ints, (1,)),
    "unflatten": (aten.unflatten.int, (2, [2, 2])),
    "squeeze": (aten.squeeze.default, ()),
    "unsqueeze": (aten.unsqueeze.default, (1,)),
    "expand by ones": (aten.expand.default, ([1, 2, 3, 4],)),
    "permute": (aten.permute.default, ([2, 0, 1],)),
    "transpose": (aten.transpose.int, (0, -1)),
    "mT": (aten.mT.default, ()),
    "adjoint": (aten.adjoint.default, ()),
    "movedim": (aten.movedim.intlist, ([0, 1], [2, 0])),
    "swapaxes": (aten.swapaxes.default, (0, 1)),
    "slice": (aten.slice.Tensor, (2, 1, 4, 2)),
    "slice from the end": (aten.slice.Tensor, (1, -2, 2**63 - 1)),
    "narrow": (aten.narrow.default, (2, -3, 2)),
    "split": (aten.split.Tensor, (2, 2)),
    "split_with_sizes": (aten.split_with_sizes.default, ([1, 3], 2)),
    "chunk": (aten.chunk.default, (2, -1)),
    "tensor_split": (aten.tensor_split.sections, (3, 2)),
    "hsplit": (aten.hsplit.int, (3,)),
    "vsplit": (aten.vsplit.int, (2,)),
    "dsplit": (aten.dsplit.int, (2,)),
    "select": (aten.select.int, (1, -1)),
    "unbind": (aten.unbind.int, (2,)),
    "diagonal": (aten.diagonal.default, (1, 1, 2)),
    "as_strided": (aten.as_strided.default, ([2, 2], [1, 5], 3)),
    "view as bits": (aten.view.dtype, (torch.int32,)),
}


def described(op: Any, args: tuple[Any, ...], whole: torch.Tensor, number: int) -> ViewCall:
    _, attrs = split_call(op, (whole, *args), {})
    made = op(whole, *args)
    parts = (made,) if isinstance(made, torch.Tensor) else tuple(made)
    return ViewCall(op._opname, attrs, whole, parts, number)


def apply(call: ViewOperator | None, *tensors: torch.Tensor) -> torch.Tensor:
    return tensors[-1] if call is None else resolve(call.op)(*tensors, *call.args)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("number", [0, -1])
def test_write_then_read(name: str, number: int) -> None:
    op, args = VIEWS[name]
    whole = torch.randn(2, 3, 4)
    call = described(op, args, whole, number % len(described(op, args, whole, 0).parts))
    view = describe_view(call)
    assert view is not None
    assert torch.equal(apply(view.read, whole), call.part)

    new = torch.randn(call.part.shape).to(call.part.dtype)
    written = apply(view.write, whole, new) if view.partial else apply(view.write, new)
    expected = whole.clone()
    described(op, args, expected, call.number).part.copy_(new)
    assert torch.equal(written.view(torch.int32), expected.view(torch.int32))
    assert torch.equal(apply(view.read, written), new)


def test_complex_and_real() -> None:
    whole = torch.randn(3, 2)
    for op in (aten.view_as_complex.default, aten.view_as_real.default):
        call = described(op, (), whole, 0)
        view = describe_view(call)
        assert view is not None
        assert torch.equal(apply(view.read, whole), call.part)
        assert torch.equal(apply(view.write, call.part), whole)
        whole = call.part


def test_the_same_tensor_is_no_operator() -> None:
    assert describe_view(described(aten.reshape.default, ([2, 3],), torch.ones(2, 3), 0)) == SAME


def test_overlapping_views_cannot_be_written() -> None:
    whole = torch.randn(1, 4)
    for op, args in ((aten.expand.default, ([3, 4],)), (aten.unfold.default, (1, 2, 1))):
        view = describe_view(described(op, args, whole, 0))
        assert view is not None
        assert not view.writable
        assert torch.equal(apply(view.read, whole), op(whole, *args))


def test_unknown_views_have_no_description() -> None:
    whole = torch.randn(2, 2, dtype=torch.complex64)
    assert describe_view(ViewCall("real", {}, whole, (whole.real,))) is None
    assert describe_view(ViewCall("_conj", {}, whole, (whole.conj(),))) is None


def test_a_view_is_two_calls() -> None:
    call = described(aten.select.int, (0, 1), torch.ones(2, 3), 0)
    assert describe_view(call) == ViewRow(
        ViewOperator("aten.select.int", (0, 1)),
        ViewOperator("aten.select_scatter.default", (0, 1)),
        partial=True,
    )
