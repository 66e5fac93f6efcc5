"""Contiguous stages against every cut."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardwright.errors import PlanError
from shardwright.planning.stages import (
    MemoryLimit,
    Tables,
    best_chain,
    by_bytes,
    contiguous,
    cut_places,
    range_tables,
    recut,
    stages_between,
)
from shardwright.planning.workload import SentValue, Shares, StoredValue, Workload
from tests.planning.workloads import (
    kept_by,
    members,
    merit,
    seconds_of,
    sent_to,
    stored_by,
    workloads,
)

# --- contiguous cuts against every cut ------------------------------------------------------------


def every_cut(workload, stages):
    for inner in combinations(range(1, len(workload)), stages - 1):
        yield stages_between([0, *inner, len(workload)])


@given(workloads())
@settings(max_examples=50, deadline=None)
def test_tables_say_what_each_range_carries(workload):
    tables = range_tables(workload, range(len(workload) + 1))
    for start, stop in combinations(range(len(workload) + 1), 2):
        nodes = set(range(start, stop))
        assert tables.seconds[start, stop] == seconds_of(workload, nodes)
        assert tables.sent[start, stop] == sent_to(workload, nodes)
        assert tables.stored[start, stop] == stored_by(workload, nodes)
        assert tables.kept[start, stop] == kept_by(workload, nodes)


@given(workloads(), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_the_contiguous_cut_is_the_best_of_all(workload, stages):
    assume(stages <= len(workload))
    found = contiguous(workload, stages)
    best = min(merit(workload, cut, range(stages)) for cut in every_cut(workload, stages))
    assert merit(workload, found, range(stages)) == best


@given(workloads(most=6), st.integers(1, 3), st.integers(0, 60), st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_what_does_not_fit_in_memory_is_no_choice(workload, stages, nbytes, microbatches):
    assume(stages <= len(workload))
    limit = MemoryLimit(nbytes, microbatches)

    def fits(partition):
        return all(
            stored_by(workload, nodes) + limit.under_way(stage, stages) * kept_by(workload, nodes)
            <= nbytes
            for stage, nodes in enumerate(members(partition, range(stages)))
        )

    fitting = [cut for cut in every_cut(workload, stages) if fits(cut)]
    if not fitting:
        with pytest.raises(PlanError, match="stages fits in memory"):
            contiguous(workload, stages, limit)
        return
    best = min(merit(workload, partition, range(stages)) for partition in fitting)
    found = contiguous(workload, stages, limit)
    assert fits(found)
    assert merit(workload, found, range(stages)) == best


def test_a_message_says_how_many_bytes_are_lacking():
    workload = Workload(("a", "b"), (1.0, 1.0), (SentValue(0, (1,), 0.0, 0, kept=100, arrived=0),))
    with pytest.raises(PlanError, match=r"stage 0 with 200 bytes, 50 more than a slot's 150"):
        contiguous(workload, 2, MemoryLimit(150, microbatches=4))


def chain(count):
    sent = tuple(SentValue(i, (i + 1,), 1.0, 1) for i in range(count - 1))
    return Workload(tuple(map(str, range(count))), (1.0,) * count, sent)


def test_of_many_nodes_cuts_are_tried_where_least_crosses():
    wide = Workload(
        tuple(map(str, range(6))),
        (1.0,) * 6,
        (
            SentValue(0, (1,), 9.0, 9),
            SentValue(1, (2,), 9.0, 9),
            SentValue(2, (3,), 1.0, 1),
            SentValue(3, (5,), 2.0, 2),
        ),
    )
    assert cut_places(wide, 2, most=2) == [0, 3, 6]
    assert cut_places(wide, 2, most=6) == list(range(7))
    coarse, fine = range_tables(wide, [0, 3, 6]), range_tables(wide, range(7))
    for (i, a), (j, b) in pairwise(enumerate([0, 3, 6])):
        assert coarse.seconds[i, j] == fine.seconds[a, b]


def most_seconds(shares):
    return max(shares.seconds)


def test_the_better_of_two_orders_is_cut():
    branches = Workload(
        tuple("abcd"),
        (1.0,) * 4,
        (SentValue(0, (2,), 9.0, 9), SentValue(1, (3,), 9.0, 9)),
    )
    for order in ([0, 2, 1, 3], [0, 1, 2, 3]):
        found = recut(branches, order, lambda nodes: contiguous(nodes, 2), most_seconds)
        assert found == ([0, 1, 0, 1] if order[1] == 2 else [0, 1, 1, 1])
    full = MemoryLimit(-1)
    with pytest.raises(PlanError, match="no cut in 2 stages fits in memory"):
        recut(branches, [0, 2, 1, 3], lambda nodes: contiguous(nodes, 2, full), most_seconds)


@given(workloads(most=8, least=2), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_no_contiguous_cut_holds_less(workload, stages):
    assume(stages <= len(workload))
    memory = MemoryLimit(0, 4)

    def fullest(cut):
        return max(memory.held(Shares.of(workload, cut, range(stages))))

    every = (
        stages_between([0, *cuts, len(workload)])
        for cuts in combinations(range(1, len(workload)), stages - 1)
    )
    assert fullest(by_bytes(workload, stages, memory)) == min(map(fullest, every))


@given(workloads(), st.integers(1, 3), st.integers(0, 60))
@settings(max_examples=60, deadline=None)
def test_work_that_is_allowed_is_as_good_as_less(workload, stages, allowed):
    assume(stages <= len(workload))

    def judged(cut):
        work = max(sum(workload.seconds[i] for i in nodes) for nodes in members(cut, range(stages)))
        return max(work, allowed), merit(workload, cut, range(stages))[1]

    best = min(judged(cut) for cut in every_cut(workload, stages))
    assert judged(contiguous(workload, stages, allowed=allowed)) == best


@given(workloads(), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_anchored_stages_all_read_something_stored(workload, stages):
    assume(stages <= len(workload))

    def is_anchored(cut):
        return {cut[node] for node in workload.anchors} == set(range(stages))

    anchored = [*filter(is_anchored, every_cut(workload, stages))]
    if not anchored:
        with pytest.raises(PlanError):
            contiguous(workload, stages, anchored=True)
        return
    found = contiguous(workload, stages, anchored=True)
    assert is_anchored(found)
    best = min(merit(workload, cut, range(stages)) for cut in anchored)
    assert merit(workload, found, range(stages)) == best


# --- chains of cuts through tables ----------------------------------------------------------------


def tables(seconds, sent=None):
    seconds = np.array(seconds, float)
    seconds[np.tril_indices(len(seconds))] = np.inf
    zeros = np.zeros_like(seconds)
    return Tables(seconds, zeros if sent is None else np.array(sent, float), zeros, zeros)


def test_the_largest_stage_is_smallest():
    found = tables([[0, 1, 5, 9], [0, 0, 2, 4], [0, 0, 0, 1], [0, 0, 0, 0]])
    assert best_chain(found, 1) == [0, 3]
    assert best_chain(found, 2) == [0, 1, 3]
    assert best_chain(found, 3) == [0, 1, 2, 3]


def test_of_equal_chains_the_one_that_sends_least():
    seconds = [[0, 4, 4, 9], [0, 0, 2, 4], [0, 0, 0, 4], [0, 0, 0, 0]]
    sent = [[0, 0, 0, 0], [0, 0, 0, 3], [0, 0, 0, 2], [0, 0, 0, 0]]
    assert best_chain(tables(seconds, sent), 2) == [0, 2, 3]


def test_more_stages_than_there_are_cuts_are_refused():
    with pytest.raises(PlanError, match="cannot be cut in 3 stages; ask for fewer"):
        best_chain(tables([[0, 1, 5], [0, 0, 2], [0, 0, 0]]), 3)


def test_more_stages_than_there_are_cuts_are_no_want_of_memory():
    with pytest.raises(PlanError, match="cannot be cut in 3 stages; ask for fewer"):
        best_chain(tables([[0, 1, 5], [0, 0, 2], [0, 0, 0]]), 3, MemoryLimit(10.0))


# --- how many microbatches a stage holds, by schedule ---------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "chunks", "expected"),
    [
        ("gpipe", 1, [8, 8]),
        ("1f1b", 1, [2, 1]),
        ("zb-h1", 1, [2, 2]),
        ("interleaved", 2, [4, 3, 2, 1]),
        ("zb-v", 2, [4, 3, 2, 1]),
    ],
)
def test_schedules_hold_different_numbers_of_microbatches(schedule, chunks, expected):
    limit = MemoryLimit(1.0, 8, schedule, chunks)
    stages = len(expected)
    found = [limit.under_way(stage, stages) for stage in range(stages)]
    assert found == expected


def test_a_rank_holds_its_stored_values_once_and_what_is_under_way():
    sent = (
        SentValue(0, (1,), 1.0, 1, kept=10, arrived=5),
        SentValue(1, (2,), 1.0, 1, kept=100, arrived=50),
    )
    workload = Workload(tuple("abc"), (1.0,) * 3, sent, (StoredValue((0, 2), 1000),))
    shares = Shares.of(workload, [0, 1, 2], range(3))
    assert MemoryLimit(0.0, 8).held(shares) == [1000 + 3 * 10, 2 * 105, 1000 + 50]
    chunked = Shares.of(workload, [0, 0, 1], (0, 0))
    assert MemoryLimit(0.0, 1, "interleaved", 2).held(chunked) == [1000 + 110]
