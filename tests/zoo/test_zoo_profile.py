"""Every layer of every family can be measured alone."""

import pytest

from shardwright.profiling import profile
from tests.zoo.captures import single
from zoo.models import BY_NAME


@pytest.mark.zoo
@pytest.mark.parametrize("name", BY_NAME)
def test_a_profile_has_every_node_and_costs_every_node(name: str) -> None:
    graph = single(name).graph
    found = profile(graph, n_iter=1, cache=False)
    assert [node_id for layer in found.layers for node_id in layer.nodes] == [
        node.id for node in graph.nodes
    ]
    costs = found.costs()
    measured = sum(sum(costs.node(graph, node)) for node in graph.nodes)
    assert measured == pytest.approx((found.forward_time + found.backward_time) / 1e3)
