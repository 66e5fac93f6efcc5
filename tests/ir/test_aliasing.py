"""Which values may share memory, and programs that write into memory given away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.ir import Builder, IRGraph, IRValue, compile_graph
from shardwright.ir.aliasing import (
    donate,
    in_place_sibling,
    may_return_an_argument,
    memory_roots,
)
from shardwright.ir.values import Input

N = 3


def test_roots() -> None:
    builder = Builder("roots")
    x, y = builder.input("x", (N, N)), builder.input("y", (N, N))
    view = builder.call("aten.t.default", x)
    product = builder.call("aten.mm.default", view, y)
    flat = builder.call("aten._unsafe_view.default", product, [N * N])
    maybe = builder.call("aten.dropout.default", flat, 0.5, False)
    graph = builder.finish([maybe])
    names = {value_id: value.name for value_id, value in graph.values.items()}
    found = {
        names[value_id]: {names[root] for root in roots}
        for value_id, roots in memory_roots(graph).items()
    }
    product = {"mm"}
    assert found == {
        "x": {"x"}, "y": {"y"}, "t": {"x"}, "mm": product, "_unsafe_view": product,
        "dropout": product,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("op", "shares"),
    [
        ("aten.t.default", True),
        ("aten.reshape.default", True),
        ("aten._unsafe_view.default", True),
        ("aten.dropout.default", True),
        ("aten.add.Tensor", False),
        ("aten.clone.default", False),
        ("aten._foreach_add.List", False),
    ],
)
def test_operators_that_may_return_an_argument(op: str, shares: bool) -> None:
    assert may_return_an_argument(op) == shares


# --- donation -------------------------------------------------------------------------------------

Step = Callable[[Builder, IRValue, IRValue], IRValue | list[IRValue]]

STEPS: dict[str, Step] = {
    "add": lambda b, x, y: b.call("aten.add.Tensor", x, y),
    "subtract half": lambda b, x, y: b.call("aten.add.Tensor", x, y, alpha=-0.5),
    "multiply": lambda b, x, y: b.call("aten.mul.Tensor", x, y),
    "addmm": lambda b, x, y: b.call("aten.addmm.default", x, y, y),
    "view": lambda b, x, y: b.call("aten.view.default", x, [N, N]),
    "transpose": lambda b, x, y: b.call("aten.t.default", x),
    "no dropout": lambda b, x, y: b.call("aten.dropout.default", x, 0.5, False),
    "both": lambda b, x, y: b.call("aten._foreach_add.List", [x, y], [y, x]),
    "scatter": lambda b, x, y: b.call("aten.slice_scatter.default", x, y, 0, 0, N),
}


def matrices(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(N, N, generator=generator, dtype=torch.float64) for _ in range(count)]


@st.composite
def donating_graphs(draw: Any) -> tuple[IRGraph, dict[int, int], set[int]]:
    """A graph, some of its inputs donated to some of its results, and which count as zeros."""
    builder = Builder("donating")
    pool = [builder.input(f"x{i}", (N, N), "f64") for i in range(draw(st.integers(1, 3)))]
    inputs = list(pool)
    for name in draw(st.lists(st.sampled_from(list(STEPS)), min_size=1, max_size=5)):
        made = STEPS[name](builder, draw(st.sampled_from(pool)), draw(st.sampled_from(pool)))
        pool += made if isinstance(made, list) else [made]
    results = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=3))
    graph = builder.finish(results)
    wanted = draw(st.lists(st.sampled_from(graph.outputs), max_size=len(inputs)))
    donated = dict(zip(draw(st.permutations(graph.inputs)), wanted, strict=False))
    zeros = {value_id for value_id in donated if draw(st.booleans())}
    return graph, donated, zeros


@given(donating_graphs())
def test_a_donating_program_gives_what_the_graph_does(
    case: tuple[IRGraph, dict[int, int], set[int]],
) -> None:
    graph, donated, zeros = case
    given_in = matrices(len(graph.inputs))
    place = {value_id: k for k, value_id in enumerate(graph.inputs)}
    clean = [
        x.zero_() if i in zeros else x for i, x in zip(graph.inputs, matrices(3), strict=False)
    ]
    expected = compile_graph(graph)([x.clone() for x in clean])
    found = compile_graph(graph, donated=donated, zeros=zeros)(given_in)
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-14, atol=1e-14)
    for argument, result in donated.items():
        wanted = expected[graph.outputs.index(result)]
        torch.testing.assert_close(given_in[place[argument]], wanted, rtol=1e-14, atol=1e-14)
    kept = set(graph.inputs) - set(donated)
    assert all(torch.equal(given_in[place[i]], clean[place[i]]) for i in kept)


def two_inputs(write: Step, shape: tuple[int, ...] = (N, N)) -> tuple[IRGraph, dict[int, int]]:
    """``x``, donated to the graph's one result, and ``y``."""
    builder = Builder("two")
    x, y = builder.input("x", shape, "f64"), builder.input("y", (N, N), "f64")
    graph = builder.finish(write(builder, x, y))
    return graph, {graph.inputs[0]: graph.outputs[0]}


class Calls(TorchDispatchMode):
    """The operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("write", "later", "first"),
    [
        (STEPS["add"], ["aten.add_.Tensor"], ["aten.copy_.default"]),
        (lambda b, x, y: STEPS["add"](b, y, x), ["aten.add_.Tensor"], ["aten.copy_.default"]),
        (STEPS["addmm"], ["aten.addmm_.default"], ["aten.addmm_.default"]),
        (STEPS["multiply"], ["aten.mul_.Tensor"], ["aten.zero_.default", "aten.mul_.Tensor"]),
        (
            STEPS["scatter"],
            ["aten.slice_scatter.default", "aten.copy_.default"],
            ["aten.zero_.default", "aten.slice_scatter.default", "aten.copy_.default"],
        ),
        (
            lambda b, x, y: b.call("aten.add.Tensor", STEPS["add"](b, x, y), STEPS["add"](b, x, y)),
            [*["aten.add.Tensor"] * 3, "aten.copy_.default"],
            ["aten.zero_.default", *["aten.add.Tensor"] * 3, "aten.copy_.default"],
        ),
    ],
    ids=["a sum", "a sum's second", "a product added", "a factor", "no sibling", "read twice"],
)
def test_what_is_called(write: Step, later: list[str], first: list[str]) -> None:
    """On contents as they are, and on contents that count as zeros."""
    graph, donated = two_inputs(write)
    for zeros, expected in (((), later), (donated, first)):
        program = compile_graph(graph, donated=donated, zeros=zeros)
        x, y = matrices(2)
        with Calls() as calls:
            (result,) = program([x, y])
        assert calls.names == expected
        assert result.data_ptr() == x.data_ptr()


def test_zeros_may_hold_anything() -> None:
    graph, donated = two_inputs(STEPS["addmm"])
    x, y = matrices(2)
    (found,) = compile_graph(graph, donated=donated, zeros=donated)([x.fill_(torch.nan), y])
    assert torch.equal(found, y @ y)


def test_a_fused_optimizer_writes_to_parameters_and_state() -> None:
    """Its gradients, which it would only write to with a scale, stay as they are."""
    builder = Builder("adamw")
    names = ("p0", "p1", "g0", "g1", "m0", "m1", "v0", "v1")
    tensors = [builder.input(name, (N, N), "f64") for name in names]
    steps = [builder.input(f"step{i}", (), "f32") for i in range(2)]
    lr = builder.input("lr", (), "f64")
    counted = builder.call("aten._foreach_add.Scalar", steps, 1)
    made = [builder.value(f"{name}_new", (N, N), "f64") for name in names]
    lists = {
        "self": [Input(1), Input(2)],
        "grads": [Input(3), Input(4)],
        "exp_avgs": [Input(5), Input(6)],
        "exp_avg_sqs": [Input(7), Input(8)],
        "max_exp_avg_sqs": [],
        "state_steps": [Input(9), Input(10)],
    }
    options = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    flags = dict.fromkeys(("amsgrad", "maximize"), False) | dict.fromkeys(
        ("grad_scale", "found_inf")
    )
    builder.emit(
        "aten._fused_adamw.tensor_lr",
        [lr, *tensors, *counted],
        lists | options | flags,
        outputs=made,
    )
    kept = [k for k, name in enumerate(names) if name[0] != "g"]
    graph = builder.finish([*(made[k] for k in kept), *counted])
    places = [*kept, 8, 9]
    donated = {graph.inputs[k]: result for k, result in zip(places, graph.outputs, strict=True)}
    given_in = [
        *matrices(8),
        torch.ones(()),
        torch.ones(()),
        torch.tensor(0.1, dtype=torch.float64),
    ]
    given_in[6].abs_(), given_in[7].abs_()
    wanted = [x.clone() for x in given_in]
    with Calls() as calls:
        compile_graph(graph, donated=donated)(given_in)
    assert calls.names == ["aten._foreach_add_.Scalar", "aten._fused_adamw_.tensor_lr"]
    torch._fused_adamw_(
        wanted[0:2], wanted[2:4], wanted[4:6], wanted[6:8], [], [torch.full((), 2.0)] * 2,
        lr=wanted[10], beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8, amsgrad=False,
        maximize=False,
    )  # fmt: skip
    assert all(map(torch.equal, given_in[:8], wanted[:8]))
    assert [x.item() for x in given_in[8:10]] == [2, 2]


def test_what_may_not_be_written_to_is_cloned() -> None:
    """One of two sums goes to a donated argument, the other's summand is an argument of others."""
    builder = Builder("mixed")
    x, y = builder.input("x", (N, N), "f64"), builder.input("y", (2 * N, N), "f64")
    part = builder.call("aten.slice.Tensor", y, 0, 0, N)
    graph = builder.finish(builder.call("aten._foreach_add.Scalar", [x, part], 1))
    donated = {graph.inputs[0]: graph.outputs[0]}
    given_x, given_y = torch.zeros(N, N).double(), torch.zeros(2 * N, N).double()
    with Calls() as calls:
        found = compile_graph(graph, donated=donated)([given_x, given_y])
    assert calls.names == [
        "aten.slice.Tensor", "aten.clone.default", "aten._foreach_add_.Scalar",
    ]  # fmt: skip
    assert (found[0].data_ptr(), found[1].sum()) == (given_x.data_ptr(), N * N)
    assert (given_x.sum(), given_y.sum()) == (N * N, 0)


def test_siblings() -> None:
    add = in_place_sibling("aten.add.Tensor")
    assert add is not None
    assert (str(add[0]), add[1]) == ("aten.add_.Tensor", ("self",))
    fused = in_place_sibling("aten._fused_adamw.tensor_lr")
    assert fused is not None
    assert fused[1] == ("self", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")
    assert in_place_sibling("aten.mm.default") is None
    assert in_place_sibling("aten.slice_scatter.default") is None


def test_another_layout_is_copied() -> None:
    builder = Builder("transposed")
    x = builder.input("x", (N, N), "f64", strides=(1, N))
    y = builder.input("y", (N, N), "f64")
    graph = builder.finish(builder.call("aten.mul.Tensor", builder.call("aten.exp.default", x), y))
    donated = {graph.inputs[0]: graph.outputs[0]}
    given_x, given_y = matrices(2)
    expected = given_x.t().exp() * given_y
    (found,) = compile_graph(graph, donated=donated)([given_x.t(), given_y])
    assert torch.equal(found, expected)
    assert torch.equal(given_x.t(), expected)


def test_what_is_not_donated_has_no_donation() -> None:
    graph, _ = two_inputs(STEPS["add"])
    assert donate(graph, {}, frozenset()).nodes == {}
