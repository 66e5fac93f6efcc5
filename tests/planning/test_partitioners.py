"""Partitioners of graphs: what they give, and what they refuse."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.clusters import Cluster, Link, Links
from shardwright.errors import PlanError
from shardwright.planning.partition import make_partition, task_of
from shardwright.planning.partitioners import (
    PARTITIONERS,
    metis_partition,
    pipedream,
    pipedream_partition,
)
from shardwright.planning.stages import MemoryLimit
from shardwright.planning.workload import StoredValue, Workload
from tests.graphs import language_model
from tests.planning.workloads import is_acyclic, kept_by, seconds_of, stored_by, workloads
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


# --- PipeDream's dynamic program against exhaustive search over cuts and numbers of slots ---------


FAST = Links.of(Link(0.0, 100.0), Link(0.5, 10.0), start=1.0)
SLOW = Links.of(Link(0.0, 100.0), Link(2.0, 1.0), start=1.0)


def every_way(count, slots):
    """Cuts and the number of slots of each stage."""
    for stages in range(1, min(count, slots) + 1):
        for inner in combinations(range(1, count), stages - 1):
            for ends in combinations(range(1, slots), stages - 1):
                yield [0, *inner, count], [b - a for a, b in pairwise([0, *ends, slots])]


def slowest(workload, cluster, cuts, replicas, *, rows, microbatches, limit):
    """The time of the slowest stage, None where that cannot be."""
    first, times = 0, []
    for stage, ((start, stop), many) in enumerate(zip(pairwise(cuts), replicas, strict=True)):
        nodes = set(range(start, stop))
        own = cluster.devices[first : first + many]
        first += many
        stored = stored_by(workload, nodes)
        seconds = seconds_of(workload, nodes) / many
        if many > 1 and stored:
            seconds += cluster.among(own).seconds("all_reduce", many, stored) / microbatches
        under_way = min(len(replicas) - stage, microbatches)
        held = stored + under_way * kept_by(workload, nodes) / many
        if many > rows or held > limit:
            return None
        times.append(seconds)
    return max(times)


@given(
    workloads(most=6),
    st.sampled_from([(1, 1), (3, 3), (4, 4), (4, 2)]),
    st.sampled_from([1, 4]),
    st.sampled_from([40, 80, 1000]),
    st.sampled_from([2, 8]),
)
@settings(max_examples=60, deadline=None)
def test_no_cut_and_no_numbers_of_slots_are_faster(workload, slots, microbatches, limit, rows):
    cluster = Cluster.of(*slots, inside=FAST, between=SLOW)
    options = {"rows": rows, "microbatches": microbatches, "limit": limit}
    times = [
        time
        for cuts, replicas in every_way(len(workload), slots[0])
        if (time := slowest(workload, cluster, cuts, replicas, **options)) is not None
    ]
    options["limit"] = MemoryLimit(limit, microbatches)
    if not times:
        with pytest.raises(PlanError):
            pipedream(workload, cluster, **options)
        return
    found = pipedream(workload, cluster, **options)
    assert found.seconds == pytest.approx(min(times))
    options["limit"] = limit
    time = slowest(workload, cluster, found.cuts, found.replicas, **options)
    assert time == pytest.approx(min(times))


def test_a_heavy_stage_gets_more_slots():
    workload = Workload(("light", "heavy"), (10.0, 30.0))
    found = pipedream(workload, Cluster.of(4, inside=FAST), rows=8)
    assert found == ([0, 2], [4], 10.0)
    held = Workload(("light", "heavy"), (10.0, 30.0), stored=(StoredValue((0,), 1000),))
    found = pipedream(held, Cluster.of(4, inside=FAST), rows=8)
    assert found == ([0, 1, 2], [1, 3], 10.0)


def test_what_does_not_fit_and_too_few_rows_are_said():
    workload = Workload(("a", "b"), (1.0, 1.0), stored=(StoredValue((0,), 1000),))
    with pytest.raises(PlanError, match="no cut on 2 slots fits in 500 bytes a slot"):
        pipedream(workload, Cluster.of(2), rows=8, limit=MemoryLimit(500))
    with pytest.raises(PlanError, match="4 slots have no work: 2 stages of at most 1 slots"):
        pipedream(workload, Cluster.of(4), rows=1)
