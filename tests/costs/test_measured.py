"""Costs of nodes that were measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.autodiff.needed import needing_gradients, trained_parameters
from shardwright.clusters import CPU_CORE
from shardwright.costs.cost import GRAPHS, Analytic, Costs, Measured, NodeCost
from shardwright.costs.measurement import Measurement, Timing, call_key
from shardwright.ir import IRGraph, IRNode
from shardwright.sharding.strategy import WHOLE, LargestPart
from tests.graphs import language_model

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
