"""Elementwise operators that feed one another become chains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import shardwright as sw
from shardwright.compiler.passes.decompose import decompose
from shardwright.compiler.passes.pointwise import LONGEST, WIDEST, fuse_pointwise
from shardwright.compiler.passes.pointwise_rules import ROWS
from shardwright.ir import Builder, IRGraph, IRValue, resolve
from shardwright.kernels.operators import CHAIN
from tests.compiler.passes.rewritten import captured, operators, programs, rewritten

X, Y, ROW = torch.randn(3, 4), torch.rand(3, 4) + 0.5, torch.randn(4)


def fused(function: Callable[..., Any], *inputs: torch.Tensor, tolerance: float = 0.0) -> IRGraph:
    graph = decompose(captured(function, *inputs))
    return rewritten(graph, fuse_pointwise, inputs, tolerance=tolerance)


CHAINS: dict[str, tuple[Callable[..., Any], str]] = {
    "in a row": (
        lambda x, y: torch.tanh(x * y + 0.5),
        "mul x0 x1; add %0 0.5; tanh %1 -> %2",
    ),
    "read twice": (
        lambda x, y: (x * y).exp() - x * 2,
        "mul x0 x1; exp %0; mul x0 2.0; sub %1 %2 -> %3",
    ),
    "gelu": (lambda x, y: F.gelu(x * y), "mul x0 x1; gelu %0 -> %1"),
    "gelu tanh": (lambda x, y: F.gelu(x, approximate="tanh"), "gelu_tanh x0 -> %0"),
    "scaled": (lambda x, y: torch.sub(x, y, alpha=3), "mul x1 3.0; sub x0 %0 -> %1"),
    "from a number": (lambda x, y: 1 - x, "sub 1.0 x0 -> %0"),
    "powers": (
        lambda x, y: y**2 + y**3 + y**-0.5 + y**1.5,
        "square x0; square x0; mul %1 x0; add %0 %2; rsqrt x0; add %3 %4; pow x0 1.5; "
        "add %5 %6 -> %7",
    ),
    "clamped": (lambda x, y: x.clamp(-1, 1), "max x0 -1.0; min %0 1.0 -> %1"),
    "masked": (
        lambda x, y: x.masked_fill(x > y, float("-inf")) * 1,
        "gt x0 x1; where %0 -inf x0; mul %1 1.0 -> %2",
    ),
    "chosen": (lambda x, y: torch.where(x < 0, x, y), "lt x0 0.0; where %0 x0 x1 -> %1"),
    "logic": (
        lambda x, y: (x < 0) & ~(y > 1) | torch.isnan(x),
        "lt x0 0.0; gt x1 1.0; not %1; and %0 %2; isnan x0; or %3 %4 -> %5",
    ),
    "silu": (lambda x, y: F.silu(x) * y, "silu x0; mul %0 x1 -> %1"),
    "products added": (
        lambda x, y: torch.addcmul(x, x, y, value=0.5),
        "mul x0 0.5; mul %0 x1; add x0 %1 -> %2",
    ),
    "leaky": (lambda x, y: F.leaky_relu(x, 0.1), "gt x0 0.0; mul x0 0.1; where %0 x0 %1 -> %2"),
}


@pytest.mark.parametrize("name", CHAINS)
def test_programs(name: str) -> None:
    function, expected = CHAINS[name]
    after = fused(function, X, Y, tolerance=1e-6)  # torch multiplies and adds in one rounding
    assert programs(after) == [expected]


def test_what_broadcasts_is_an_input() -> None:
    after = fused(lambda x, row: (x * row).exp() + row, X, ROW)
    assert programs(after) == ["mul x0 x1; exp %0; add %1 x1 -> %2"]


def test_what_others_read_is_an_output_too() -> None:
    after = fused(lambda x: (lambda y: (y.sum(), y * 2))(x.exp()), X)
    assert programs(after) == ["exp x0; mul %0 2.0 -> %0 %1"]
    (chain,) = [node for node in after.nodes if node.op == CHAIN]
    assert len(chain.outputs) == 2


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x.relu(), ["relu"]),
        (lambda x: x + x, ["add"]),
        (lambda x: x.to(torch.float64), ["_to_copy"]),
        (lambda x: x + 1, ["chain"]),
        (lambda x: x.exp(), ["chain"]),
        (lambda x: (x + x).relu(), ["chain"]),
    ],
)
def test_what_stands_alone(function: Callable[..., Any], expected: list[str]) -> None:
    assert operators(fused(function, X)) == expected


def test_not_across_a_sum_and_never_in_a_cycle() -> None:
    def softmax(x: torch.Tensor) -> torch.Tensor:
        e = (x - 1).exp()
        return e / e.sum(-1, keepdim=True) + e

    after = fused(softmax, X)
    assert programs(after) == ["sub x0 1.0; exp %0 -> %1", "div x0 x1; add %0 x0 -> %1"]


def test_what_waits_keeps_no_more_alive() -> None:
    def late(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = x.sum(0, keepdim=True).exp()  # waits for the product, which alone reads it
        return a * y.sum(0, keepdim=True).sum(1, keepdim=True).expand(1, 4)

    assert programs(fused(late, X, Y)) == ["exp x0; mul %0 x1 -> %1"]

    def held(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = x.sum(0) * y.sum(0)  # would keep two alive instead of one
        return a * y.sum(0).sum(0).expand(4)

    assert len(programs(fused(held, X, Y))) == 2


def test_shapes_divide_chains() -> None:
    after = fused(lambda x, row: x * (row.exp() + 1), X, ROW)
    assert programs(after) == ["exp x0; add %0 1.0 -> %1", "mul x0 x1 -> %0"]


def test_layouts_divide_chains_and_are_kept() -> None:
    after = fused(lambda x: (x.t() * 2).exp(), X)
    assert programs(after) == ["mul x0 2.0; exp %0 -> %1"]
    assert after.values[after.outputs[0]].strides == (1, 4)


def test_inner_values_may_lie_in_any_way() -> None:
    after = fused(lambda x, y: x.t() * 2 + (y * 3).exp(), X, torch.rand(4, 3))
    assert programs(after) == ["mul x0 2.0; mul x1 3.0; exp %1; add %0 %2 -> %3"]
    assert after.values[after.outputs[0]].strides == (1, 4)


def test_outputs_that_lie_in_different_ways_are_of_different_chains() -> None:
    def two(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = (x.t() * 2).exp(), (y * 3).exp()
        return a + b, b

    assert programs(fused(two, X, torch.rand(4, 3))) == [
        "mul x0 3.0; exp %0 -> %1",
        "mul x0 2.0; exp %0; add %1 x1 -> %2",
    ]


def test_long_and_wide_chains_are_divided() -> None:
    def long(x: torch.Tensor) -> torch.Tensor:
        for i in range(LONGEST + 5):
            x = x * (1 + i / 100)
        return x

    lengths = [len(program.split(";")) for program in programs(fused(long, X))]
    assert lengths == [LONGEST, 5]
    many = [torch.randn(3, 4) for _ in range(WIDEST + 4)]

    def wide(*inputs: torch.Tensor) -> torch.Tensor:
        total = inputs[0]
        for item in inputs[1:]:
            total = total + item
        return total

    after = fused(wide, *many)
    chains = [node for node in after.nodes if node.op == CHAIN]
    assert len(chains) == 2
    assert all(len(node.inputs) + len(node.outputs) <= WIDEST for node in chains)


def test_halves_are_rounded_after_each_step() -> None:
    after = fused(lambda x: (x * 1.1).exp().float() * 2, X.bfloat16())
    assert programs(after) == ["mul x0 1.1 -> %0", "exp x0 -> %0", "mul x0 2.0 -> %0"]


def test_casts_are_loads_and_stores() -> None:
    def casts(x: torch.Tensor) -> torch.Tensor:
        return ((x.float() + 1) * 2).bfloat16()

    after = fused(casts, X.bfloat16())
    assert programs(after) == ["add x0 1.0; mul %0 2.0 -> %1"]
    assert after.nodes[0].attrs["dtypes"] == "bf16"


def test_f64_is_computed_as_f64() -> None:
    def between(x: torch.Tensor) -> torch.Tensor:
        return (x.double() / 3 * 3).float()

    after = fused(between, X)
    assert CHAIN not in [node.op for node in after.nodes]  # no operand would say that it is f64
    assert programs(fused(lambda x: x.exp() / 3, X.double())) == ["exp x0; div %0 3.0 -> %1"]


def test_integers_only_where_floats_are_exact() -> None:
    labels = torch.tensor([0, -100, 2**40, 5])
    assert programs(fused(lambda i: i != -100, labels)) == ["ne x0 -100.0 -> %0"]
    assert operators(fused(lambda i: i != 2**30, labels)) == ["ne"]
    assert operators(fused(lambda i: i + 1, labels)) == ["add"]
    assert operators(fused(lambda i, j: i < j, labels, labels)) == ["lt"]
    assert programs(fused(lambda x, i: x * i, ROW, labels)) == ["mul x0 x1 -> %0"]


def test_an_f64_number_in_a_tensor_leaves_f32_steps_alone() -> None:
    rate = torch.tensor(0.1, dtype=torch.float64)
    assert operators(fused(lambda x, rate: x * rate, X, rate)) == ["mul"]


def test_constants_of_no_dimension_are_literals() -> None:
    builder = Builder()
    x, half = builder.input("x", (3, 4)), builder.constant("half", torch.tensor(0.5))
    weight = builder.param("weight", torch.tensor(2.0))
    y = builder.call("aten.mul.Tensor", builder.call("aten.add.Tensor", x, half), weight)
    alone = builder.call("aten.exp.default", half)
    after = rewritten(builder.finish([y, alone]), fuse_pointwise, [X])
    assert programs(after) == ["add x0 0.5; mul %0 x1 -> %1"]
    assert operators(after)[-1] == "exp"


UNARY = ["exp", "tanh", "relu", "neg", "sigmoid"]


@st.composite
def graphs(draw: st.DrawFn) -> tuple[IRGraph, list[torch.Tensor]]:
    """Elementwise operators, sums and transposes in any arrangement."""
    builder = Builder()
    values: list[IRValue] = [builder.input(f"x{i}", (3, 3)) for i in range(2)]
    for _ in range(draw(st.integers(1, 14))):
        kind = draw(st.sampled_from(["unary", "binary", "binary", "compare", "sum", "t", "bias"]))
        x, y = (draw(st.sampled_from(values)) for _ in range(2))
        if kind == "unary":
            made = builder.call(f"aten.{draw(st.sampled_from(UNARY))}.default", x)
        elif kind == "binary":
            made = builder.call(f"aten.{draw(st.sampled_from(['add', 'mul']))}.Tensor", x, y)
        elif kind == "compare":
            mask = builder.call("aten.gt.Tensor", x, y)
            made = builder.call("aten.where.self", mask, x, y)
        elif kind == "sum":
            made = builder.call("aten.sum.dim_IntList", x, [0], True)
            made = builder.call("aten.mul.Tensor", made, y)
        elif kind == "t":
            made = builder.call("aten.t.default", x)
        else:
            made = builder.call("aten.mul.Tensor", builder.call("aten.select.int", x, 0, 0), y)
        values.append(made)
    outputs = draw(st.lists(st.sampled_from(values[2:]), min_size=1, max_size=3))
    return builder.finish(outputs), [torch.rand(3, 3) - 0.5 for _ in range(2)]


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_any_graph_computes_the_same(drawn: tuple[IRGraph, list[torch.Tensor]]) -> None:
    graph, inputs = drawn
    rewritten(graph, fuse_pointwise, inputs)


def test_every_row_names_an_operator_of_torch() -> None:
    for name in ROWS:
        resolve(name)


def test_there_is_no_chain_without_a_kernel_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would interpret it, cast by cast."""

    class Gated(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(x) * x + y * 0.5

    model, (x, y) = Gated(), torch.randn(2, 8, 8).bfloat16()
    assert "chain" in sw.compile(model, x, y).trace(x, y).counts
    for module in ("bind", "executor"):
        monkeypatch.setattr(f"shardwright.compiler.{module}.load", lambda: None)
    program = sw.compile(model, x, y)
    counts = program.trace(x, y).counts
    assert "chain" not in counts
    assert sum(counts.values()) == 4, "as many as the model calls"
    assert torch.equal(program(x, y), model(x, y))
