"""Partitioners of graphs: what they give, and what they refuse."""

import pytest

from shardwright.clusters import Cluster
from shardwright.errors import PlanError
from shardwright.planning.partition import make_partition, task_of
from shardwright.planning.partitioners import (
    PARTITIONERS,
    metis_partition,
    pipedream_partition,
)
from shardwright.planning.workload import Workload
from tests.graphs import language_model
from tests.planning.workloads import is_acyclic
from tests.steps import image_step, language_step

GRAPHS = {
    "model": language_model(layers=3, width=64, vocabulary=500),
    "step": language_step(layers=3, width=64, vocabulary=500, batch=4, length=32),
    "images": image_step(),
}


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
@pytest.mark.parametrize("policy", PARTITIONERS)
def test_every_node_is_in_a_stage_that_reads_none_later(graph, policy):
    task = task_of(graph, 3)
    found = PARTITIONERS[policy](task)
    assert len(found.stages) == len(task.workload)
    assert is_acyclic(task.workload, found.stages)
    assert set(found.stages) == set(range(len(found.shares)))
    assert sum(share.nodes for share in found.shares) == len(task.workload)
    assert found.policy == policy


def test_pipedream_gives_slots_to_stages():
    graph = GRAPHS["step"]
    found = pipedream_partition(graph, Cluster.of(4, 2), microbatches=4)
    assert sum(found.replicas) == 4
    assert len(found.replicas) == len(found.shares)
    held = sum(share.stored_bytes for share in found.shares)
    with pytest.raises(PlanError, match="no cut on 2 slots fits in 1000 bytes a slot"):
        pipedream_partition(graph, 2, memory=1000)
    assert pipedream_partition(graph, 4, memory=held).replicas


def test_a_partition_of_replicas_says_so():
    workload = Workload(("a", "b"), (1.0, 2.0))
    found = make_partition(workload, "g", "p", [0, 1], replicas=[1, 3], notes=["as it is"])
    assert str(found).splitlines() == [
        "partition of g: p, 2 stages, 0.000 MB between them",
        "  stage 0: 1 node, 1000.000 ms, 0.00 MB stored",
        "  stage 1 on 3 slots: 1 node, 2000.000 ms, 0.00 MB stored",
        "  note: as it is",
    ]


def test_equal_graphs_give_equal_partitions():
    one, other = (metis_partition(language_model(layers=5), 3) for _ in range(2))
    assert one == other
