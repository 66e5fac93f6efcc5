"""Prices between all layouts against the search from one to another."""

import itertools

import numpy as np
import pytest

from shardwright.clusters import Cluster, Link, Links, Mesh
from shardwright.errors import PlanError
from shardwright.planning.split_costs import PricedTensor, prices
from shardwright.sharding import Layout, Partial, Replicate, Shard, convert
from shardwright.sharding.strategy import normal

SLOW = Links.of(Link(3e-5, 1e8), Link(5e-5, 2e8), 1e-4)
CASES = [
    ((4,), (8, 12), [Shard(0), Shard(1), Partial()]),
    ((4,), (12, 640), [Shard(0), Shard(1), Shard(1, 64), Partial(), Partial("max")]),
    ((2, 3), (6, 12, 5), [Shard(0), Shard(1), Shard(2), Partial()]),
    ((2, 2), (3, 10), [Shard(0), Shard(1), Shard(1, 5), Partial()]),
]


@pytest.mark.parametrize(("sizes", "shape", "shards"), CASES, ids=str)
def test_prices_and_ways_are_those_of_the_search(sizes, shape, shards):
    mesh = Mesh.of(dict(zip("abc", sizes, strict=False)))
    cluster = Cluster.of(len(mesh.devices), sizes[-1], between=SLOW)
    layouts = set()
    for placements in itertools.product([Replicate(), *shards], repeat=len(sizes)):
        try:
            layouts.add(normal(placements, sizes, shape))
        except PlanError:
            continue
    table = prices(PricedTensor(shape, 4, sizes, cluster.links(mesh)), layouts)
    by_number = list(table.numbers)
    for source, target in itertools.product(layouts, repeat=2):
        a, b = table.numbers[source], table.numbers[target]
        try:
            way = convert(Layout(source), Layout(target), mesh=mesh, shape=shape, cluster=cluster)
        except PlanError:
            assert np.isinf(table.seconds[a, b])
            continue
        assert table.seconds[a, b] == pytest.approx(way.seconds, abs=1e-11)
        assert [by_number[n] for n in table.way(a, b)] == [at.placements for at in way.layouts]


def test_what_is_held_on_the_way_may_be_gone_on_from():
    sizes, shape = (4,), (8, 12)
    cluster = Cluster.of(4)
    table = prices(PricedTensor(shape, 4, sizes, cluster.links(Mesh.of({"a": 4}))), [(Partial(),)])
    partial, whole, rows = (table.numbers[(p,)] for p in (Partial(), Replicate(), Shard(0)))
    assert table.after(partial, whole)[rows] == 0
    assert table.after(partial, rows)[whole] <= table.seconds[partial, whole]
    assert np.isinf(table.after(partial, whole)[partial])
    assert table.after(partial, partial)[partial] == 0
