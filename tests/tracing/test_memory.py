"""Writes: whatever a program does to shared memory, the graph gives the same tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardwright.errors import CaptureError
from shardwright.ir import resolve
from shardwright.ir.operators import split_call
from shardwright.tracing.memory import SAME, ViewCall, ViewOperator, ViewRow, describe_view
from tests.tracing.equality import assert_same, captured, operators


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 4, requires_grad=True)


# --- writes and views ----------------------------------------------------------------------


def test_whole_tensor(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        y = m.linear(x)
        y.add_(1).mul_(x)
        return y.relu_()

    assert operators(assert_same(function, x)) == ["linear", "add", "mul", "relu"]


def test_a_view_sees_a_write_to_its_whole(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        y = m.linear(x)
        first, turned = y[0], y.t()
        before = first * 1
        y.mul_(2)
        return before, first * 1, turned, y

    assert_same(function, x)


def test_the_whole_sees_a_write_to_its_view(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        y = m.linear(x)
        y[:, 1] = 5
        y.view(-1)[2:7].add_(x.sum())
        y.t()[0].copy_(x[:, 3])
        torch.diagonal(y).zero_()
        return y

    graph = assert_same(function, x)
    assert {"select_scatter", "slice_scatter", "diagonal_scatter"} <= set(operators(graph))


def test_pieces_of_a_tensor() -> None:
    def function(m: Any, x: Any) -> Any:
        y = x * 1
        a, b = y.unbind(0)[:2]
        a.mul_(b)
        y.split(2, 1)[1].sigmoid_()
        y.chunk(3)[-1].add_(a)
        return y, a, b

    assert_same(function, torch.randn(3, 4))


def test_views_of_views_and_their_siblings(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        y = m.linear(x)
        inner = y.view(3, 2, 2).permute(2, 0, 1)[1, :, :1]
        sibling = y.unsqueeze(0).expand(2, 3, 4)
        inner.add_(10)
        return inner, sibling, y.reshape(2, 6), y

    assert_same(function, x)


def test_identities_share_memory(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        y = m.linear(x)
        same = nn.functional.dropout(y.to(torch.float32).contiguous(), 0.5, training=False)
        same.add_(1)
        last = same[0]
        y.mul_(3)
        return y, same, last

    graph = assert_same(function, x)
    assert "to" not in operators(graph)
    assert "dropout" not in operators(graph)


def test_constants_are_copied_before_they_are_written(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        table = torch.tensor([1.0, 2.0, 3.0, 4.0])
        table.add_(x.sum())
        return table * x

    assert_same(function, x)


def test_writes_in_a_loop(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        out = torch.zeros(3, 4)
        for i in range(3):
            out[i] = m.linear(x)[i] + out.sum()
        return out

    assert_same(function, x)


def test_complex_numbers(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        z = torch.view_as_complex((x * 2).view(3, 2, 2))
        z.mul_(1j)
        return torch.view_as_real(z)

    assert_same(function, x)


def test_as_strided_is_read_from_the_whole_memory(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        y = (x * 2)[1:]
        window = y.as_strided((2, 2), (4, 1), 5)
        return window, y

    assert_same(function, x)


# --- buffers -----------------------------------------------------------------------------


def test_buffers_become_updates(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        m.steps.add_(1)
        m.average.mul_(0.9)
        m.average[1:3] += x.detach().mean() * m.steps
        return x * m.average

    graph = assert_same(function, x)
    assert [graph.values[old].name for old in graph.updates] == ["steps", "average"]


def test_a_buffer_written_but_not_read_is_an_update_all_the_same(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        m.average.copy_(x.detach().mean(0))
        return x * 2

    assert len(assert_same(function, x).updates) == 1


def test_tied_buffers_are_one(x: torch.Tensor) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("a", torch.zeros(4))
            self.register_buffer("b", self.a)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.a.add_(1)
            return x * self.b

    (old,) = assert_same(Model(), x).updates
    assert old >= 0


# --- what is refused ---------------------------------------------------------------------


def test_memory_shared_behind_torchs_back_is_refused(x: torch.Tensor) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("a", torch.zeros(8))
            self.register_buffer("b", self.a[:4])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.b.add_(1)
            return x * self.a[:4]

    with pytest.raises(CaptureError, match="shares memory"):
        assert_same(Model(), x)


def test_expanded_tensors_are_not_written(x: torch.Tensor) -> None:
    with pytest.raises(CaptureError, match="expand"):
        captured(lambda m, x: (x[0] * 1).expand(3, 4).add_(1), x)


def test_unknown_views_are_refused_by_name(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        z = torch.complex(x, x)
        z.real.add_(1)
        return z.abs()

    with pytest.raises(CaptureError, match=r"`z.real.add_\(1\)`.*clone"):
        captured(function, x)


# --- any program -------------------------------------------------------------------------

Step = tuple[str, int, int]
TENSOR_STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]] = {
    # views
    "view": lambda a, b, k: a.reshape(-1) if a.is_contiguous() else a,
    "row": lambda a, b, k: a[k % a.shape[0]] if a.dim() else a,
    "tail": lambda a, b, k: a[k % a.shape[0] :] if a.dim() else a,
    "transposed": lambda a, b, k: a.t() if a.dim() == 2 else a,
    "unsqueezed": lambda a, b, k: a.unsqueeze(k % (a.dim() + 1)) if a.dim() < 3 else a,
    "diagonal": lambda a, b, k: a.diagonal() if a.dim() == 2 else a,
    "every other": lambda a, b, k: a[..., ::2] if a.dim() else a,
    "half": lambda a, b, k: a.chunk(2, -1)[k % len(a.chunk(2, -1))] if a.dim() else a,
    "unbound": lambda a, b, k: a.unbind(0)[k % a.shape[0]] if a.dim() else a,
    "detached": lambda a, b, k: a.detach(),
    # new tensors
    "double": lambda a, b, k: a * 2,
    "sum": lambda a, b, k: a + b.sum(),
    "clone": lambda a, b, k: a.clone(),
    # writes
    "add_": lambda a, b, k: a.add_(b.mean()),
    "mul_": lambda a, b, k: a.mul_(0.5),
    "fill_": lambda a, b, k: a.fill_(k),
    "copy_": lambda a, b, k: a.copy_(b.sum()),
    "relu_": lambda a, b, k: a.relu_(),
    "set first": lambda a, b, k: set_first(a, b.sum()),
    "unsqueeze_": lambda a, b, k: a.unsqueeze_(0) if a.dim() < 3 else a,
}


def set_first(a: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if a.dim():
        a[0] = value
    return a


def program(steps: list[Step]) -> Callable[[Any, Any], list[torch.Tensor]]:
    """A forward that makes tensors from tensors, step by step."""

    def function(m: Any, x: Any) -> Any:
        tensors = [m.linear(x), x.sum(0) + 1]
        for name, i, j in steps:
            a, b = tensors[i % len(tensors)], tensors[j % len(tensors)]
            tensors.append(TENSOR_STEPS[name](a, b, i + j))
        return tensors

    return function


def steps(*left_out: str) -> st.SearchStrategy[list[Step]]:
    names = sorted(TENSOR_STEPS.keys() - set(left_out))
    step = st.tuples(st.sampled_from(names), st.integers(0, 9), st.integers(0, 9))
    return st.lists(step, min_size=2, max_size=14)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(steps())
def test_any_program_of_views_and_writes(steps: list[Step]) -> None:
    with torch.no_grad():
        assert_same(program(steps), torch.randn(4, 4))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(steps("detached", "unbound", "half", "relu_", "unsqueeze_"))
def test_gradients_of_any_program(steps: list[Step]) -> None:
    """Left out: what capture refuses to write to, or eager to differentiate."""
    assert_same(program(steps), torch.randn(4, 4, requires_grad=True))


# --- views ----------------------------------------------------------------------------------------


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
