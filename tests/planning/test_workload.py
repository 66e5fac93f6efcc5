"""Workloads, and the sums that each rank carries."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.clusters import CPU_CORE, GLOO
from shardwright.costs import Analytic
from shardwright.ir import Builder
from shardwright.planning.pipeline import held_bytes
from shardwright.planning.step_graph import forward_view
from shardwright.planning.workload import Shares, workload_of
from tests.graphs import language_model
from tests.planning.workloads import (
    kept_by,
    members,
    random_parts,
    seconds_of,
    sent_to,
    stored_by,
    workloads,
)
from tests.steps import language_step

# --- workloads of graphs: what nodes take, what flows between them, and what may be done again ----


COSTS = Analytic(CPU_CORE)


def test_a_model_costs_its_forward_and_sends_each_value_once():
    graph = language_model(layers=1)
    found = workload_of(graph, COSTS, GLOO)
    assert len(found) == len(graph.nodes)
    assert found.seconds == tuple(COSTS.node(graph, node).forward for node in graph.nodes)
    values = [graph.values[node.outputs[0]] for node in graph.nodes if graph.nodes[-1] is not node]
    assert [value.nbytes for value in found.sent] == [value.nbytes for value in values]
    assert [v.seconds for v in found.sent] == [GLOO.send.seconds(v.nbytes) for v in values]
    assert {value.kept for value in found.sent} == {0}
    assert found.names[3] == "layers.0: linear"
    assert found.predecessors[5] == [1, 4]
    assert found.successors[1] == [2, 5]


def test_a_step_costs_its_backward_too_and_gradients_go_back():
    graph = language_step(layers=1)
    view = forward_view(graph)
    found = workload_of(view, COSTS, GLOO, step=graph, held=held_bytes(graph))
    assert found.seconds == tuple(COSTS.node(graph, node).total for node in view.nodes)
    first = found.sent[0]
    table = view.nodes[0]
    nbytes = view.values[table.outputs[0]].nbytes
    assert (first.nbytes, first.seconds) == (2 * nbytes, 2 * GLOO.send.seconds(nbytes))
    labels = next(value for value in found.sent if "slice" in found.names[value.maker])
    assert labels.nbytes in (v.nbytes * times for v in graph.values.values() for times in (1, 2))
    assert found.stored[0].nbytes == pytest.approx(4 * 50 * 8 * 8, abs=100)
    assert any(value.kept for value in found.sent)


def test_a_view_is_kept_as_what_it_is_a_view_of():
    builder = Builder("step")
    x = builder.input("x", (4, 8), "f64")
    weight = builder.param("w", torch.rand(8, 8, dtype=torch.float64))
    y = builder.call("aten.linear.default", x, weight)
    y = builder.call("aten.view.default", y, [2, 16])
    y = builder.call("aten.mul.Tensor", y, y)
    graph = builder.finish(builder.call("aten.sum.default", y))
    made, viewed, squared = workload_of(graph, COSTS, GLOO, step=graph).sent
    assert (made.kept, viewed.kept, squared.kept) == (256, 0, 0)
    assert (made.arrived, viewed.arrived) == (256, 256)


def test_what_is_done_once_a_step_is_left_out():
    graph = language_model(layers=1)
    whole, rest = (workload_of(graph, COSTS, GLOO, first=first) for first in (0, 2))
    assert rest.seconds == whole.seconds[2:]
    assert [value.maker + 2 for value in rest.sent] == [v.maker for v in whole.sent if v.maker > 1]


# --- sums, against their definitions --------------------------------------------------------------


@given(workloads(), st.integers(0, 2**32), st.sampled_from([(0, 1, 2), (0, 1, 0), (0, 0, 1)]))
@settings(max_examples=60, deadline=None)
def test_shares_are_sums_of_what_nodes_carry(workload, seed, ranks):
    stages = random_parts(Random(seed), workload, 3)
    shares, found = Shares.of(workload, stages, ranks), members(stages, ranks)
    assert shares.nodes == [stages.count(stage) for stage in range(3)]
    assert shares.work == [sum(workload.seconds[i] for i in nodes) for nodes in found]
    assert shares.seconds == [seconds_of(workload, nodes) for nodes in found]
    assert shares.stored == [stored_by(workload, nodes) for nodes in found]
    assert shares.kept == [kept_by(workload, nodes) for nodes in found]
    assert shares.sent == pytest.approx(sum(sent_to(workload, nodes) for nodes in found))
    assert shares.crossing == 10 * shares.sent
