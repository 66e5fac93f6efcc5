"""The minimum cut against every choice there is."""

from itertools import chain, combinations

import pytest

from shardwright.building.recompute import LayerActivations, demand, kept_at
from shardwright.ir import Builder
from shardwright.planning.pipeline import node_work


def layer(width):
    """Two products with cheap operators around them, and all that their backward reads."""
    builder = Builder("layer")
    x = builder.input("x", (16, width))
    weights = [builder.input(f"w{i}", (width, width)) for i in range(2)]
    made = [builder.call("aten.mm.default", x, weights[0])]
    made.append(builder.call("aten.relu.default", made[-1]))
    made.append(builder.call("aten.view.default", made[-1], [4, 4, width]))
    made.append(builder.call("aten.view.default", made[-1], [16, width]))
    made.append(builder.call("aten.mm.default", made[-1], weights[1]))
    made.append(builder.call("aten.tanh.default", made[-1]))
    made.append(builder.call("aten.add.Tensor", made[-1], x))
    needed = dict.fromkeys(value.id for value in (made[1], made[3], made[4], made[5]))
    return builder.graph, LayerActivations(list(builder.graph.nodes), {made[6].id}, needed)


def cost(graph, block, kept, price):
    found = demand(block, kept)
    own = {v for node in block.nodes for v in node.outputs} - block.fixed
    bytes_kept = sum(graph.values[v].nbytes for v in found.kept & own)
    return price * bytes_kept + sum(node_work(graph, node) for node in found.again)


@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize("price", [0.5, 4, 16, 64, 1024])
def test_it_costs_as_little_as_any_choice(width, price):
    graph, block = layer(width)
    own = [v for node in block.nodes for v in node.outputs if v not in block.fixed]
    choices = chain.from_iterable(combinations(own, n) for n in range(len(own) + 1))
    best = min(cost(graph, block, choice, price) for choice in choices)
    assert cost(graph, block, kept_at(graph, block, price), price) == best


def test_cheap_operators_are_done_again_before_products():
    """Of a product and what a cheap operator makes of it, the one is kept that is read."""
    graph, block = layer(512)
    names = {v: graph.values[v].name for v in graph.values}
    kept = {names[v] for v in kept_at(graph, block, 64)}
    assert kept == {"relu", "mm__1"}
    assert kept_at(graph, block, 2.0**30) == frozenset()
