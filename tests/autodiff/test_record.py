"""What a function runs below autograd becomes a functional graph."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwright.autodiff.record import Function, record, simplify
from shardwright.errors import GraphError
from shardwright.ir import Builder, IRGraph, IRValue
from shardwright.ir.tensor_meta import TensorMeta
from tests.building.derivatives import run
from tests.tracing.equality import operators

MODE = FakeTensorMode()


def recorded(function: Function, *shapes: tuple[int, ...]) -> IRGraph:
    found = record(function, [TensorMeta(shape, "f64") for shape in shapes], MODE, "cpu")
    return found.builder.finish([v for v in found.results if v is not None])


def same(function: Function, *shapes: tuple[int, ...]) -> list[str]:
    """Hold the graph of a function against the function; gives its operators."""
    graph = recorded(function, *shapes)
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    expected = function([tensor.clone() for tensor in tensors])
    for found, expectation in zip(run(graph, tensors), expected, strict=True):
        assert torch.equal(found, expectation)
    return operators(graph)


def test_composite_operators_are_taken_apart():
    assert same(lambda t: [torch.nn.functional.linear(*t)], (2, 3), (4, 3)) == ["t", "mm"]


def test_writes_become_new_values():
    def function(tensors):
        total = torch.zeros_like(tensors[0])
        total[:, 1:] += tensors[0][:, 1:]
        total.mul_(2)
        return [total]

    assert not any(op.endswith("_") for op in same(function, (2, 3)))


def test_pieces_that_are_written_to_are_apart():
    """Recurrent cells write gates in place; the pieces of an unsafe split share nothing."""

    def function(tensors):
        first, second = torch.ops.aten.unsafe_split.Tensor(tensors[0] + 0, 2, 1)
        return [first.sigmoid_() * second.tanh_()]

    assert "unsafe_split" in same(function, (2, 4))


def test_an_argument_may_be_a_result_and_a_result_nothing():
    found = record(lambda t: [t[1], None, t[0]], [TensorMeta((2,), "f64")] * 2, MODE, "cpu")
    first, second = found.builder.graph.inputs
    assert found.results == [second, None, first]
    assert found.builder.graph.nodes == []


def test_numbers_in_tensors_are_made_anew():
    assert same(lambda t: [t[0] * torch.tensor(3.0, dtype=torch.float64)], (2,))


def test_tensors_from_outside_are_refused():
    outside = torch.randn(3)
    with pytest.raises(GraphError, match=r"reads a tensor \[3\] that is none of its operator's"):
        recorded(lambda t: [t[0] + outside], (3,))


def test_strides_are_those_of_the_kernels():
    """The fake backward of a layer norm keeps its input's strides, the kernels do not."""
    kind = TensorMeta((2, 3, 4), "f64", (12, 1, 3))

    def function(tensors):
        x = tensors[0].requires_grad_()
        with torch.enable_grad():
            y = torch.nn.functional.layer_norm(x, (4,))
        return torch.autograd.grad(y, x, torch.ones_like(y))

    found = record(function, [kind], MODE, "cpu")
    assert found.builder.graph.values[found.results[0]].strides is None


def test_nothing_runs_under_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same(lambda t: [t[0] @ t[1]], (2, 3), (3, 2)) == ["mm"]


# --- views that show again what another value shows are taken out, and no others ----------------


def chain(builder: Builder, x: IRValue, *calls: tuple[object, ...]) -> IRValue:
    for op, *args in calls:
        x = builder.call(f"aten.{op}", x, *args)
    return x


@pytest.mark.parametrize(
    "calls",
    [
        [("t.default",), ("t.default",)],
        [("t.default",), ("permute.default", [1, 0])],
        [("view.default", [12]), ("view.default", [3, 4])],
        [("view.default", [2, 6]), ("t.default",), ("t.default",), ("view.default", [3, 4])],
        [("unsqueeze.default", 0), ("squeeze.dim", 0)],
        [("expand.default", [3, 4])],
        [("alias.default",)],
    ],
)
def test_a_way_there_and_back(calls):
    builder = Builder()
    x = builder.input("x", (3, 4))
    assert simplify(builder.graph, [chain(builder, x, *calls).id]) == [x.id]


@pytest.mark.parametrize(
    "calls",
    [
        [("t.default",), ("view.dtype", torch.int32), ("t.default",)],
        [("slice.Tensor", 0, 1, 3), ("view.default", [8]), ("view.default", [2, 4])],
        [("flip.default", [0]), ("flip.default", [0])],
        [("t.default",), ("reshape.default", [3, 4])],
    ],
)
def test_what_shows_something_else_stays(calls):
    builder = Builder()
    x = builder.input("x", (3, 4))
    found = simplify(builder.graph, [chain(builder, x, *calls).id])
    assert found != [x.id]


def test_readers_and_results_take_the_value_that_stays():
    builder = Builder()
    x = builder.input("x", (3, 4))
    again = chain(builder, x, ("t.default",), ("t.default",))
    y = builder.call("aten.relu.default", again)
    assert simplify(builder.graph, [y.id, None, again.id]) == [y.id, None, x.id]
    assert builder.graph.nodes[-1].inputs == [x.id]
