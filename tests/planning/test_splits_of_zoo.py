"""On models as they are written: the best splits are no worse than any policy's."""

import pytest

from shardwright.clusters import Cluster
from shardwright.clusters.links import LINKS
from shardwright.costs.cost import Analytic
from shardwright.errors import PlanError
from shardwright.planning.rules import split_nodes
from shardwright.planning.splits import best_splits

pytest.importorskip("transformers")

from tests.turns import rotated
from tests.zoo.captures import single
from zoo.models import BY_NAME

pytestmark = pytest.mark.zoo


@pytest.mark.parametrize(("name", "links"), rotated([*BY_NAME][::3], ["gloo", "nvlink3"]))
def test_best_is_no_worse_than_the_policies(name, links):
    view, axes = single(name).graph, {"tensor": 2}
    cluster = Cluster.of(2, inside=LINKS[links])
    for training in (False, True):
        given = {"cluster": cluster, "costs": Analytic(cluster.device), "training": training}
        best = best_splits(view, axes, **given)
        for policy in ("data", "tensor", "sequence"):
            try:
                splits, _ = split_nodes(view, {policy: 2})
            except PlanError:
                continue  # the policy has nothing to split
            fixed = {"tensor": [split for (split,) in splits]}
            priced = best_splits(view, axes, fixed=fixed, **given)
            assert best.seconds <= priced.seconds + 1e-9
