"""The order of nodes that are done together."""

from __future__ import annotations

import pytest
import torch

from shardwright.compiler.passes.pointwise import units
from shardwright.errors import GraphError
from tests.compiler.passes.rewritten import captured

X = torch.randn(3)
GRAPH = captured(lambda x: (x.exp(), x.sin().sum(), x.cos() * x.tanh()), X)
EXP, SIN, SUM, COS, TANH, MUL = GRAPH.nodes


def order(*groups: list[object]) -> list[list[str]]:
    return [[node.op.split(".")[1] for node in unit] for unit in units(GRAPH, groups)]


def test_single_nodes_stay_in_order() -> None:
    assert order() == [["exp"], ["sin"], ["sum"], ["cos"], ["tanh"], ["mul"]]


def test_a_group_stands_where_its_last_node_stood() -> None:
    assert order([EXP, TANH])[-2:] == [["exp", "tanh"], ["mul"]]
    assert order([SIN, TANH])[1:] == [["cos"], ["sin", "tanh"], ["sum"], ["mul"]]


def test_groups_that_need_one_another_are_refused() -> None:
    graph = captured(lambda x: x.exp().sum() + x.exp(), X)
    first, total, second, add = graph.nodes
    with pytest.raises(GraphError, match="need one another"):
        units(graph, [[first, add], [total, second]][:1])
