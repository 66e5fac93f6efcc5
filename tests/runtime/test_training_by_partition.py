"""Training by the plans of partitioners: losses and evaluations are those of eager."""

import pytest

from shardwright.clusters import Cluster, Link, Links
from shardwright.planner import plan
from shardwright.planning.partitioners import PARTITIONERS
from tests.runtime.test_training_by_plan import captured, check

QUICK = Links.of(send=Link(1e-9, 1e12), collective=Link(1e-9, 1e12))
"""Links so fast that only the work counts."""


@pytest.mark.parametrize("policy", PARTITIONERS)
def test_every_partitioner(policy: str) -> None:
    check("perceptron", plan(captured("perceptron", 2), 2, policy, microbatches=2))


@pytest.mark.parametrize("slots", [2, 3])
def test_slots_that_share_a_stages_rows(slots: int) -> None:
    made = plan(captured("gpt", 2), Cluster.of(slots, inside=QUICK), "pipedream", microbatches=2)
    assert max(map(len, made.training.slots)) > 1
    check("gpt", made)


@pytest.mark.parametrize("policy", ["metis"])
def test_stages_that_split_their_layers(policy: str) -> None:
    mesh, cluster = {"pipeline": 2, "tensor": 2}, Cluster.of(4, inside=QUICK)
    check("gpt", plan(captured("gpt", 2), cluster, mesh=mesh, policy=policy, microbatches=2))
