"""Costs of nodes that were measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.autodiff.needed import needing_gradients, trained_parameters
from shardwright.clusters import CPU_CORE, DEVICES, DeviceModel
from shardwright.costs.cost import GRAPHS, Analytic, Costs, Measured, NodeCost
from shardwright.costs.measurement import Measurement, Timing, call_key
from shardwright.costs.roofline import STATE_PASSES, UPDATE_PASSES
from shardwright.ir import Builder, IRGraph, IRNode
from shardwright.sharding.strategy import WHOLE, LargestPart
from tests.graphs import language_model
from tests.steps import language_step

ROUND = DeviceModel("round", "cuda", 10**9, flops=1e9, bandwidth=1e6, overhead=1e-3)
SIZES = st.integers(1, 200)


def linear(rows=8, inner=16, columns=4, *, bias=True, dtype=torch.float32):
    """A graph of relu and linear; the linear stands last."""
    builder = Builder("linear")
    x = builder.input("x", (rows, inner), "f32" if dtype == torch.float32 else "bf16")
    first = builder.param("first", torch.empty(inner, dtype=dtype))
    x = builder.call("aten.mul.Tensor", x, first)
    stored = [builder.param("w", torch.empty(columns, inner, dtype=dtype))]
    stored += [builder.param("b", torch.empty(columns, dtype=dtype))] if bias else []
    return builder.finish(outputs=builder.call("aten.linear.default", x, *stored))


def call(op, *shapes, stored=(), dtype="f32", **attrs):
    """The cost of one call on the round device; inputs come of a parameter, so they are trained."""
    builder = Builder("call")
    scale = builder.param("scale", torch.empty(()))
    values = [
        builder.param(f"p{i}", torch.empty(shape))
        if i in stored
        else builder.call("aten.mul.Tensor", builder.input("x", shape, dtype), scale)
        for i, shape in enumerate(shapes)
    ]
    out = builder.call(op, *values, **attrs)
    graph = builder.finish(outputs=out)
    return Analytic(ROUND).node(graph, graph.nodes[-1])


def test_a_product_that_memory_bounds():
    moved = 4 * (8 * 16 + 4 * 16 + 4 + 8 * 4)
    cost = Analytic(ROUND).node(linear(), linear().nodes[-1])
    assert cost.forward == pytest.approx(moved / 1e6 + 1e-3)
    assert cost.backward == pytest.approx((moved - 4 * 4) / 1e6 + 1e-3)
    product, sum_and_addition = 8 * 4 + 8 * 16 + 2 * 4 * 16, (8 * 4 + 4) + 3 * 4
    assert cost.weight == pytest.approx(4 * (product + sum_and_addition) / 1e6 + 3e-3)
    assert cost.total == cost.forward + cost.backward + cost.weight


def test_a_product_that_arithmetic_bounds():
    fast = DeviceModel("memory", "cuda", 10**9, flops=1e9, bandwidth=1e15)
    graph = linear(128, 256, 64)
    assert Analytic(fast).node(graph, graph.nodes[-1]).forward == 2 * 128 * 256 * 64 / 1e9


def test_half_precision_has_its_own_rate():
    device = DeviceModel("gpu", "cuda", 10**9, flops=1e9, bandwidth=1e15, half_flops=4e9)
    whole, half = linear(128, 256, 64), linear(128, 256, 64, dtype=torch.bfloat16)
    slow = Analytic(device).node(whole, whole.nodes[-1])
    fast = Analytic(device).node(half, half.nodes[-1])
    assert fast.forward == pytest.approx(slow.forward / 4)
    same = DeviceModel("gpu", "cuda", 10**9, flops=1e9, bandwidth=1e15)
    assert Analytic(same).node(half, half.nodes[-1]) == pytest.approx(slow, rel=1e-6)


@pytest.mark.parametrize(
    ("cost", "moved", "calls"),
    [
        # forward; the backward reads the gradient and what is saved, and writes
        (call("aten.relu.default", (10, 10)), (200, 300), 1),
        (call("aten.neg.default", (10, 10)), (200, 200), 1),
        # what is added passes the gradient on; what is repeated adds it up
        (call("aten.add.Tensor", (10, 10), (10, 10)), (300, 0), 0),
        (call("aten.add.Tensor", (10, 10), (10,)), (210, 110), 1),
        # each factor's gradient reads the other factor
        (call("aten.mul.Tensor", (10, 10), (10, 10)), (300, 600), 2),
    ],
)
def test_what_functions_of_elements_move(cost, moved, calls):
    assert cost.forward == pytest.approx(4 * moved[0] / 1e6 + 1e-3)
    assert cost.backward == pytest.approx(4 * moved[1] / 1e6 + 1e-3 * calls)
    assert cost.weight == 0


def test_joining_gives_its_gradient_on_in_views():
    builder = Builder("cat")
    scale = builder.param("scale", torch.empty(()))
    x = builder.call("aten.mul.Tensor", builder.input("x", (4, 8), "f32"), scale)
    graph = builder.finish(outputs=builder.call("aten.cat.default", [x, x]))
    assert Analytic(ROUND).node(graph, graph.nodes[-1]).backward == 0


def test_views_cost_nothing_and_some_of_their_backwards_do():
    assert call("aten.transpose.int", (4, 8), dim0=0, dim1=1) == (0, 0, 0)
    assert call("aten.view.default", (4, 8), size=[32]) == (0, 0, 0)
    part = call("aten.select.int", (4, 8), dim=0, index=1)
    assert (part.forward, part.weight) == (0, 0)
    assert part.backward == pytest.approx(4 * (32 + 2 * 8) / 1e6 + 1e-3)


def test_a_reshape_costs_what_it_copies():
    builder = Builder("reshape")
    x = builder.input("x", (4, 8), "f32")
    turned = builder.call("aten.transpose.int", x, 0, 1)
    builder.call("aten.reshape.default", x, [32])
    graph = builder.finish(outputs=builder.call("aten.reshape.default", turned, [32]))
    free, copied = (Analytic(ROUND).node(graph, node).forward for node in graph.nodes[1:])
    assert (free, copied) == (0, pytest.approx(4 * 64 / 1e6 + 1e-3))


def test_a_lookup_reads_its_rows_and_its_gradient_is_the_table():
    builder = Builder("lookup")
    ids = builder.input("ids", (5,), "i64")
    table = builder.param("table", torch.empty(1000, 8))
    graph = builder.finish(outputs=builder.call("aten.embedding.default", table, ids))
    cost = Analytic(ROUND).node(graph, graph.nodes[-1])
    assert cost.forward == pytest.approx(2 * 4 * 40 / 1e6 + 1e-3)
    assert cost.backward == 0
    assert cost.weight > 4 * 8000 / 1e6


def test_functions_of_elements_take_a_cpu_longer_than_a_gpu():
    graph = Builder("gelu")
    graph.call("aten.gelu.default", graph.input("x", (1000, 1000), "f32"))
    made = graph.graph
    slow = DeviceModel("core", "cpu", 10**9, flops=1e9, bandwidth=1e12)
    fast = DeviceModel("gpu", "cuda", 10**9, flops=1e9, bandwidth=1e12)
    assert Analytic(fast).node(made, made.nodes[0]).forward == pytest.approx(8e6 / 1e12)
    assert Analytic(slow).node(made, made.nodes[0]).forward > 1e6 * 50 / 1e9


def test_a_cpu_waits_for_the_pages_of_large_tensors():
    def taken(size):
        builder = Builder("relu")
        builder.call("aten.relu.default", builder.input("x", (size,), "f32"))
        return Analytic(CPU_CORE).node(builder.graph, builder.graph.nodes[0]).forward / size

    assert taken(2**23) > 2 * taken(2**22)


def test_only_what_is_trained_has_gradients():
    graph = linear()
    weight = next(value.id for value in graph.stored() if value.names == ("w",))
    node = graph.nodes[-1]
    assert Analytic(ROUND, trained=frozenset()).node(graph, node)[1:] == (0, 0)
    only_weight = Analytic(ROUND, trained=frozenset((weight,))).node(graph, node)
    assert only_weight.backward == 0
    assert only_weight.weight > 0


def test_what_no_gradient_comes_back_to_has_no_backward():
    assert call("aten.gt.Scalar", (10, 10), other=0.0).backward == 0
    assert call("aten.argmax.default", (10, 10)).backward == 0


def test_a_step_s_markers_have_their_own_costs():
    graph = language_step()
    costs = Analytic(ROUND)
    by_op = {node.op: costs.node(graph, node) for node in graph.nodes}
    assert by_op["Backward"] == by_op["zero_grad"] == (0, 0, 0)
    parameters = sum(value.nbytes for value in graph.stored() if value.role == "param")
    assert by_op["adamw_step"].forward > 6 * parameters / 1e6


def test_a_graph_that_grows_is_looked_at_again():
    builder = Builder("grows")
    x = builder.call("aten.relu.default", builder.input("x", (10,), "f32"))
    costs = Analytic(ROUND)
    assert costs.node(builder.graph, builder.graph.nodes[0]).backward == 0
    builder.call("aten.mul.Tensor", x, builder.param("w", torch.empty(10)))
    assert costs.node(builder.graph, builder.graph.nodes[1]).weight > 0


def test_costs_of_a_device_are_equal():
    assert Analytic(ROUND) == Analytic(ROUND) != Analytic(CPU_CORE)
    assert len({Analytic(ROUND), Analytic(ROUND)}) == 1


def rows_of(graph, parts):
    """Of the product of `linear` one of so many equal parts of the rows."""
    x, *stored, out = (graph.values[v].shape for v in (*graph.nodes[-1].inputs, *graph.outputs))
    least = max(1, -(-x[0] // parts))
    return LargestPart(x[0] / least, ((least, *x[1:]), *stored, (least, *out[1:])))


def test_each_of_two_slots_reads_all_of_a_weight_and_adds_to_all_of_its_gradient():
    """What a split leaves whole is not shared: the rows are, the weight and the bias are not."""
    graph = linear()
    cost = Analytic(ROUND).node(graph, graph.nodes[-1], rows_of(graph, 2))
    rows, stored = 4 * (4 * 16 + 4 * 4), 4 * (4 * 16 + 4)
    assert cost.forward == pytest.approx((rows + stored) / 1e6 + 1e-3)
    assert cost.backward == pytest.approx((rows + stored - 4 * 4) / 1e6 + 1e-3)
    product, sum_and_addition = 4 * 4 + 4 * 16 + 2 * 4 * 16, (4 * 4 + 4) + 3 * 4
    assert cost.weight == pytest.approx(4 * (product + sum_and_addition) / 1e6 + 3e-3)


def test_a_reshape_that_copies_all_may_copy_nothing_of_a_part():
    builder = Builder("reshape")
    x = builder.input("x", (2, 4, 8), "f32")
    turned = builder.call("aten.transpose.int", x, 0, 1)
    graph = builder.finish(builder.call("aten.reshape.default", turned, [4, 16]))
    costs, node = Analytic(ROUND), graph.nodes[-1]
    assert costs.node(graph, node).forward > 0
    assert costs.node(graph, node, LargestPart(2, ((4, 1, 8), (4, 8)))).forward == 0
    assert costs.node(graph, node, LargestPart(2, ((2, 2, 8), (2, 16)))).forward > 0


def test_the_gradients_of_a_norm_s_scale_and_shift_are_made_in_one_pass():
    builder = Builder("norm")
    factor = builder.param("factor", torch.empty(()))
    x, scale, shift = (
        builder.call("aten.mul.Tensor", builder.input(name, shape, "f32"), factor)
        for name, shape in (("x", (10, 8)), ("scale", (8,)), ("shift", (8,)))
    )
    graph = builder.finish(builder.call("aten.layer_norm.default", x, [8], scale, shift))
    read, written = 2 * 80 + 2 * 8 + 2 * 10, 80 + 2 * 8  # means and deviations too
    cost = Analytic(ROUND).node(graph, graph.nodes[-1])
    assert cost.backward == pytest.approx(4 * (read + written) / 1e6 + 1e-3)


@pytest.mark.parametrize("dims", [{}, {"dim": [0]}])
def test_a_sum_s_gradient_is_seen_in_another_shape(dims):
    op = "aten.sum.dim_IntList" if dims else "aten.sum.default"
    assert call(op, (10, 10), **dims).backward == 0


def test_an_optimizer_does_not_write_the_gradients_that_it_gives_back():
    builder = Builder("update")
    kinds = [builder.input(name, (1000,), "f32") for name in ("p", "g", "m", "v")]
    step, rate = builder.input("step", (), "f32"), builder.input("rate", (), "f64")
    made = builder.call(
        "aten._fused_adamw.tensor_lr",
        *([value] for value in kinds), [], [step],
        lr=rate, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    graph = builder.finish([made[0], made[2], made[3]])
    cost = Analytic(ROUND).node(graph, graph.nodes[-1]).forward
    assert cost == pytest.approx((UPDATE_PASSES + 2 * STATE_PASSES) * 4e3 / 1e6 + 1e-3, rel=0.01)


@settings(max_examples=40)
@given(SIZES, SIZES, SIZES, st.sampled_from(sorted(DEVICES)))
def test_more_rows_never_cost_less_and_more_parts_never_more(rows, inner, columns, device):
    costs = Analytic(DEVICES[device])
    graph, larger = linear(rows, inner, columns), linear(rows + 1, inner, columns)
    once = costs.node(graph, graph.nodes[-1])
    more = costs.node(larger, larger.nodes[-1])
    part = costs.node(graph, graph.nodes[-1], rows_of(graph, 2))
    assert all(0 < a <= b for a, b in zip(once, more, strict=True))
    assert all(0.49 * a <= b <= a for a, b in zip(once, part, strict=True))


LINEAR, NORM, ADD = "aten.linear.default", "aten.layer_norm.default", "aten.add.Tensor"


@dataclass
class ByOperator(Costs):
    """Made-up costs: ``known`` by operator, else 1, 2 and 3 s; half of them cannot be parted."""

    known: Mapping[str, NodeCost] = field(default_factory=dict)

    def node(self, graph: IRGraph, node: IRNode, part: LargestPart = WHOLE) -> NodeCost:
        whole = self.known.get(node.op, NodeCost(1, 2, 3))
        return NodeCost(*(seconds * (0.5 + 0.5 / part.work) for seconds in whole))


def measurement(graph: IRGraph, nodes: list[IRNode], *seconds: float) -> Measurement:
    needing = needing_gradients(graph, trained_parameters(graph))
    return Measurement(Timing(*seconds), tuple(call_key(graph, node, needing) for node in nodes))


def first(graph: IRGraph, op: str, number: int = 0) -> IRNode:
    return [node for node in graph.nodes if node.op == op][number]


@pytest.fixture(scope="module")
def graph() -> IRGraph:
    return language_model(layers=3)


def test_what_was_measured_alone_costs_that_in_every_equal_node(graph: IRGraph) -> None:
    costs = Measured([measurement(graph, [first(graph, LINEAR)], 5, 6, 7)], ByOperator())
    assert costs.node(graph, first(graph, LINEAR)) == (5, 6, 7)
    assert costs.node(graph, first(graph, LINEAR, 3)) == (5, 6, 7)  # of the next layer


def test_an_operator_that_was_measured_elsewhere_is_scaled(graph: IRGraph) -> None:
    costs = Measured([measurement(graph, [first(graph, LINEAR)], 10, 40, 90)], ByOperator())
    assert costs.node(graph, first(graph, LINEAR, 1)) == (10, 40, 90)


def test_other_operators_are_scaled_as_all_that_was_measured(graph: IRGraph) -> None:
    linear = measurement(graph, [first(graph, LINEAR)], 10, 20, 30)
    costs = Measured([linear], ByOperator({ADD: NodeCost(7, 0, 0)}))
    assert costs.node(graph, first(graph, ADD)) == (70, 0, 0)


def test_without_measurements_of_this_graph_costs_are_the_fallbacks(graph: IRGraph) -> None:
    other = language_model(layers=1, width=16)
    costs = Measured([measurement(other, [first(other, LINEAR)], 5, 6, 7)], ByOperator())
    assert costs.node(graph, first(graph, LINEAR)) == (1, 2, 3)


def test_nodes_measured_together_share_it_as_the_fallback_has_it(graph: IRGraph) -> None:
    start = graph.nodes.index(first(graph, NORM))
    run = graph.nodes[start : start + 2]
    assert [node.op for node in run] == [NORM, LINEAR]
    fallback = ByOperator({NORM: NodeCost(1, 0, 1), LINEAR: NodeCost(3, 0, 1)})
    costs = Measured([measurement(graph, run, 8, 6, 10)], fallback)
    assert costs.node(graph, run[0]) == (2, 3, 5)
    assert costs.node(graph, run[1]) == (6, 3, 5)


def test_the_longest_run_counts_where_several_begin(graph: IRGraph) -> None:
    start = graph.nodes.index(first(graph, NORM))
    run = graph.nodes[start : start + 2]
    both = [measurement(graph, run[:1], 1, 1, 1), measurement(graph, run, 8, 8, 8)]
    for order in (both, both[::-1]):
        assert Measured(order, ByOperator()).node(graph, run[0]) == (4, 4, 4)


def test_a_part_is_the_share_that_the_fallback_says(graph: IRGraph) -> None:
    costs = Measured([measurement(graph, [first(graph, LINEAR)], 8, 16, 32)], ByOperator())
    assert costs.node(graph, first(graph, LINEAR), LargestPart(4)) == (
        8 * 0.625,
        16 * 0.625,
        32 * 0.625,
    )
    nothing = ByOperator({LINEAR: NodeCost(0, 0, 0)})
    costs = Measured([measurement(graph, [first(graph, LINEAR)], 8, 16, 32)], nothing)
    assert costs.node(graph, first(graph, LINEAR), LargestPart(4)) == (2, 4, 8)


def test_other_gradients_wanted_leave_the_forward_as_it_was_measured(graph: IRGraph) -> None:
    node = first(graph, LINEAR)
    key = call_key(graph, node, ())
    costs = Measured([Measurement(Timing(5.0), (key,))], ByOperator())
    assert costs.node(graph, node).forward == 5
    assert costs.node(graph, node)[1:] == (2, 3)


def test_several_graphs_are_told_apart(graph: IRGraph) -> None:
    measured = [measurement(graph, [first(graph, LINEAR)], 5, 6, 7)]
    costs = Measured(measured, ByOperator())
    others = [language_model(layers=1, width=4 + i) for i in range(2 * GRAPHS)]
    for other in (*others, graph):
        expected = (
            (5, 6, 7)
            if other is graph
            else Measured(measured, ByOperator()).node(other, first(other, LINEAR))
        )
        assert costs.node(other, first(other, LINEAR)) == expected


@settings(max_examples=60)
@given(st.lists(st.floats(0, 1e3), min_size=3, max_size=3), st.integers(1, 64), st.booleans())
def test_more_parts_never_cost_more_and_all_parts_never_less(
    seconds: list[float], parts: int, analytic: bool
) -> None:
    graph = language_model(layers=1)
    node = first(graph, LINEAR)
    fallback: Costs = Analytic(CPU_CORE) if analytic else ByOperator()
    costs = Measured([measurement(graph, [node], *seconds)], fallback)
    whole, part, next_part = (
        costs.node(graph, node, LargestPart(n)) for n in (1, parts, parts + 1)
    )
    for a, b, c in zip(whole, part, next_part, strict=True):
        assert a >= b * (1 - 1e-9)
        assert b >= c * (1 - 1e-9)
        assert parts * b >= a * (1 - 1e-9)
