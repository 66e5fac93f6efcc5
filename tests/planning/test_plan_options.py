"""Slips of a new user's hand end in one line of words, never in Python's own errors."""

import pytest
from torch import nn

from shardwright.clusters import Cluster
from shardwright.errors import PlanError
from shardwright.planner import plan
from shardwright.planning import metis_partition, partition_by_memory, pipedream_partition, predict
from tests.graphs import language_model

GRAPH = language_model(layers=1)
MODEL = nn.Linear(2, 2)
NO_GRAPH = "a graph is planned, found a Linear; capture it first"
SLIPS = [
    (lambda: plan(MODEL, 2), NO_GRAPH),
    (lambda: plan(MODEL, 2, "auto"), NO_GRAPH),
    (lambda: predict(MODEL, plan(GRAPH, 2)), NO_GRAPH),
    *(
        (lambda make=make: make(MODEL, 2), NO_GRAPH)
        for make in (metis_partition, partition_by_memory, pipedream_partition)
    ),
    (lambda: plan(GRAPH, "a"), "devices must be a number .* found 'a'; or give a Cluster"),
    (lambda: plan(GRAPH, mesh="tensor=2"), "mesh gives sizes by axis, .* found 'tensor=2'"),
    (lambda: metis_partition(GRAPH, "a"), "a partition has 1 stage or more, found 'a'"),
    (
        lambda: pipedream_partition(GRAPH, "a"),
        "devices must be a number .* found 'a'; or give a Cluster",
    ),
    (
        lambda: pipedream_partition(GRAPH, 2, microbatches=0),
        "microbatches must be a whole number from 1 up, found 0",
    ),
    *(
        (
            lambda memory=memory: pipedream_partition(GRAPH, 2, memory=memory),
            f"memory must be a number of bytes above 0, found {memory!r}",
        )
        for memory in (float("nan"), -5, 0, "a")
    ),
]


@pytest.mark.parametrize(("slip", "message"), SLIPS)
def test_a_slip_is_told_in_words(slip, message):
    with pytest.raises(PlanError, match=message):
        slip()


def test_a_cluster_stands_for_its_slots():
    assert sum(pipedream_partition(GRAPH, Cluster.of(2)).replicas) == 2
