"""Partitions of layers: whole modules in stages."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwright as sw
from shardwright.errors import PlanError
from shardwright.planning.layer_graph import (
    LayerGraph,
    grouped,
    layer_graph,
    partition_layers,
)
from shardwright.planning.mesh_plan import plan_of_partition
from shardwright.planning.workload import Shares
from tests.graphs import language_model, tokens
from tests.planning.workloads import workloads
from tests.steps import language_step


@pytest.fixture(scope="module")
def layers() -> LayerGraph:
    return layer_graph(language_model(layers=6), depth=1)


def test_layers_are_modules_and_what_stands_between_them(layers: LayerGraph) -> None:
    assert [node.kind for node in layers.nodes].count("Block") == 6
    assert [node.name for node in layers.nodes][:3] == ["embedding", "mul", "layers.0"]
    block = layers.nodes[3]
    assert str(block) == "layer 3 (layers.1: Block)"
    assert [value.shape for value in block.inputs] == [(2, 3, 8)]
    assert [value.shape for value in block.outputs] == [(2, 3, 8)]
    assert [value.names[0] for value in block.stored][:2] == [
        "layers.1.norm1.weight",
        "layers.1.mix.weight",
    ]
    assert str(layers).splitlines()[0] == "graph of language_model: 10 layers"


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_layers_stay_whole(layers: LayerGraph, parts: int) -> None:
    found = partition_layers(layers, parts)
    assert set(found.stages) == set(range(parts))
    assert found.partition is not None
    assert layers.partition is None
    for node, stage in zip(found.nodes, found.stages, strict=True):
        assert {found.partition.stages[inside.number] for inside in node.nodes} == {stage}


def test_as_many_layers_as_parts(layers: LayerGraph) -> None:
    found = partition_layers(layers, len(layers.nodes))
    assert sorted(found.stages) == list(range(len(layers.nodes)))
    with pytest.raises(PlanError, match="11 parts, but the graph 'language_model' has only 10"):
        partition_layers(layers, 11)


@given(workloads(most=10, least=3), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_groups_carry_what_their_nodes_carry(workload, seed) -> None:  # type: ignore[no-untyped-def]
    """Stages of groups, and the same stages of their nodes, have equal shares."""
    draw = Random(seed)
    groups, count = [0], 1
    for _ in range(len(workload) - 1):
        count += draw.random() < 0.5
        groups.append(count - 1)
    found = grouped(workload, groups, [f"g{i}" for i in range(count)])
    stages = [draw.randrange(3) for _ in range(count)]
    coarse = Shares.of(found, stages, range(3))
    fine = Shares.of(workload, [stages[group] for group in groups], range(3))
    assert coarse.seconds == pytest.approx(fine.seconds)
    assert coarse.stored == pytest.approx(fine.stored)
    assert (coarse.sent, coarse.crossing) == pytest.approx((fine.sent, fine.crossing))


def test_a_partition_is_a_plan_that_runs() -> None:
    graph = language_model(layers=4)
    for partition in (
        partition_layers(layer_graph(graph, depth=1), 3).partition,
        sw.metis_partition(graph, 3),
        sw.pipedream_partition(graph, 2),
    ):
        assert partition is not None
        plan = plan_of_partition(graph, partition)
        assert len(plan.stages) == len(graph.nodes)
        found = sw.run(sw.build(graph, plan), tokens(), in_process=True)
        torch.testing.assert_close(found, graph.run(tokens()), rtol=0, atol=1e-12)


def test_what_a_plan_cannot_be_made_of() -> None:
    graph, step = language_model(layers=4), language_step()
    with pytest.raises(PlanError, match="is a training step; plan it with"):
        plan_of_partition(step, sw.metis_partition(step, 2))
    with pytest.raises(PlanError, match=r"has stages of \d+ nodes, the graph .* has \d+"):
        plan_of_partition(language_model(layers=3), sw.metis_partition(graph, 2))
