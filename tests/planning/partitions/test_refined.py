"""Refinement by itself: of what partitioners made, and of stages by hand."""

from operator import truediv

import msgspec
import pytest

import shardwright as sw
from shardwright.errors import PlanError
from shardwright.layout import Cluster
from shardwright.planning.partitions.partition_task import task_of
from shardwright.planning.partitions.shares import Shares
from tests.graphs import language_model
from tests.planning.workloads import is_acyclic
from tests.steps import language_step

GRAPHS = {"model": language_model(layers=6, width=64), "step": language_step(layers=3, width=64)}


def busiest(graph, partition):
    """Seconds of the busiest rank, as its slots share them."""
    workload = task_of(graph, len(partition.ranks)).workload
    shares = Shares.of(workload, partition.stages, partition.ranks)
    return max(map(truediv, shares.seconds, partition.replicas))


def uneven(graph, stages=3):
    """All but a node a stage in the first stage."""
    count = len(task_of(graph, stages).workload)
    return [0] * (count - stages + 1) + list(range(1, stages))


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_stages_by_hand_become_better_and_the_moves_are_told(graph):
    by_hand = uneven(graph)
    found = sw.refine_partition(graph, by_hand)
    workload = task_of(graph, 3).workload
    assert is_acyclic(workload, found.stages)
    assert set(found.stages) == {0, 1, 2}
    assert found.policy == "by hand"
    assert any(note.startswith("moved ") for note in found.notes)
    assert sum(share.nodes for share in found.shares) == len(by_hand)
    assert found.shares[0].nodes < by_hand.count(0)
    before = msgspec.structs.replace(found, stages=tuple(by_hand))
    assert busiest(graph, found) < 0.9 * busiest(graph, before)


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_what_a_partitioner_made_is_no_worse_and_keeps_its_slots(graph):
    for made in (
        sw.metis_partition(graph, 3),
        sw.exact_partition(graph, 3),
        sw.pipedream_partition(graph, Cluster.of(4)),
        sw.mixed_partition(graph, 2),
    ):
        found = sw.refine_partition(graph, made)
        assert (found.policy, found.ranks, found.replicas) == (
            made.policy,
            made.ranks,
            made.replicas,
        )
        assert set(made.notes) <= set(found.notes)
        assert busiest(graph, found) <= busiest(graph, made) * (1 + 1e-9)


def test_what_is_as_good_as_can_be_stays():
    graph = GRAPHS["model"]
    once = sw.refine_partition(graph, uneven(graph))
    again = sw.refine_partition(graph, once)
    assert again.stages == once.stages
    assert again.notes == once.notes


def test_a_limit_of_memory_is_kept_or_refused():
    graph = GRAPHS["model"]
    made = sw.refine_partition(graph, uneven(graph))
    fullest = max(share.stored_bytes for share in made.shares)
    held = sw.refine_partition(graph, uneven(graph), memory=fullest)
    assert max(share.stored_bytes for share in held.shares) <= fullest
    with pytest.raises(PlanError, match=r"slot 'd[0-2]' would hold"):
        sw.refine_partition(graph, made, memory=1000)


def test_what_is_no_partition_is_refused():
    graph = GRAPHS["model"]
    made = sw.metis_partition(graph, 2)
    other = language_model(layers=2)
    backwards = [1 - stage for stage in made.stages]
    for partition, message in (
        (sw.metis_partition(other, 2), "has stages of .* nodes, the graph has"),
        (backwards, "in stage 0 reads what .* in stage 1 makes; number stages so that"),
        ([0, 2] * (len(made.stages) // 2), "stage 1 of 3 has no node, or is none"),
        ("ab", "or the number of each node's stage, from 0 up, found 'a'"),
        ([], r"or the number of each node's stage, from 0 up, found \[\]"),
        (3, "stage, from 0 up, found 3"),
        (None, "stage, from 0 up, found None"),
        ([-1] * len(made.stages), "stage, from 0 up, found -1"),
        ([0] * (len(made.stages) - 1) + [10**9], "stage 1000000000 is among those of"),
        (msgspec.structs.replace(made, stages=made.stages[1:]), "has stages of .* nodes"),
    ):
        with pytest.raises(PlanError, match=message):
            sw.refine_partition(graph, partition)
