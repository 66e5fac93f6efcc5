"""The best splits: what they are on known models, and that nothing is better."""

from collections import Counter

import pytest

from shardwright.layout import Cluster, Link, Links
from shardwright.planning.chosen import mesh_on
from shardwright.planning.forward import forward_view
from shardwright.planning.layouts import best_splits, price_splits
from shardwright.planning.mesh import split_nodes
from shardwright.planning.outline import outline_of
from shardwright.planning.step import as_step
from shardwright.planning.walk import communications, walk
from shardwright.profiling.cost import Analytic
from tests.planning.projections import linear, stacked, transformer
from tests.steps import trained

FAST = Links.of(Link(1e-6, 200e9), Link(1e-6, 200e9), 1e-6)
SLOW = Links.of(Link(1e-3, 1e6), Link(1e-3, 1e6), 1e-3)


def options(links=FAST, devices=8, **more):
    cluster = Cluster.of(devices, inside=links)
    return {"cluster": cluster, "costs": Analytic(cluster.device), "training": False, **more}


def step_view(graph):
    return forward_view(as_step(trained(graph), 1).graph)


def wide(layers=1):
    return transformer(layers, product=linear, taken=stacked, batch=8, width=256)


def moves(view, chosen, given, axes=None):
    """The kinds of communication that splits take, by phase."""
    found = walk(
        outline_of(view),
        chosen.splits,
        mesh=mesh_on(given["cluster"], axes or {"tensor": 2}),
        cluster=given["cluster"],
        training=given["training"],
    )
    return Counter((move.phase, move.step.kind) for move in communications(found.moves))


def seconds(chosen):
    return sum(cost.total for cost in chosen.nodes) + sum(chosen.once)


@pytest.mark.parametrize("axes", [{"tensor": 2}, {"data": 2, "tensor": 2}], ids=str)
def test_best_is_no_worse_than_the_policies(axes):
    view = wide(2)
    given = options()
    best = best_splits(view, axes, **given)
    splits, _ = split_nodes(view, axes)
    assert seconds(best) <= seconds(price_splits(view, axes, splits, **given)) + 1e-9


def test_nothing_is_sent_where_links_are_slow():
    given = options(SLOW)
    best = best_splits(wide(), {"tensor": 2}, **given)
    assert moves(wide(), best, given) == Counter()


def test_an_axis_that_is_fixed_stays():
    view = step_view(wide())
    data, _ = split_nodes(view, {"data": 2})
    fixed = {"data": [split for (split,) in data]}
    best = best_splits(view, {"data": 2, "tensor": 2}, fixed=fixed, **options(training=True))
    assert [splits[0] for splits in best.splits] == fixed["data"]
    assert any(splits[1] for splits in best.splits)
