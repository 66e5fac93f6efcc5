"""The pipeline policy: the cut against exhaustive search, lookup tables."""

from itertools import accumulate, combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.ir import Builder
from shardwright.planner import plan
from shardwright.planning import Split
from shardwright.planning.pipeline import (
    SLACK,
    Loads,
    cut,
    cut_table,
    find_tables,
    measure_loads,
    smallest_bound,
)
from tests.graphs import language_model

# --- the cut is held against exhaustive search on small sequences ---------------------------------


def loads_of(work, stored, shared=(), extra=0):
    single = list(accumulate(stored, initial=0))
    total = single[-1] + sum(size for size, _ in shared)
    prefix = list(accumulate(work, initial=0))
    return Loads(prefix, single, list(shared), max(prefix[-1], 1), max(total, 1), extra)


def every_cut(n, stages):
    for inner in combinations(range(1, n), stages - 1):
        yield [0, *inner, n]


def largest(loads, cuts):
    return max(loads.load(cuts[k], cuts[k + 1]) for k in range(len(cuts) - 1))


@st.composite
def cases(draw):
    n = draw(st.integers(1, 9))
    sizes = st.integers(0, 20)
    work = draw(st.lists(sizes, min_size=n, max_size=n))
    stored = draw(st.lists(sizes, min_size=n, max_size=n))
    positions = st.sets(st.integers(0, n - 1), min_size=2, max_size=4).map(sorted)
    shared = draw(st.lists(st.tuples(sizes, positions), max_size=2)) if n > 1 else []
    crossing = draw(st.lists(st.integers(0, 50), min_size=n + 1, max_size=n + 1))
    stages = draw(st.integers(1, n))
    extra = draw(st.integers(0, 5))
    return loads_of(work, stored, shared, extra), stages, crossing


@given(cases())
@settings(max_examples=200, deadline=None)
def test_smallest_bound_is_the_exhaustive_minimum(case):
    loads, stages, _ = case
    n = len(loads.work) - 1
    expected = min(largest(loads, cuts) for cuts in every_cut(n, stages))
    assert smallest_bound(loads, stages) == pytest.approx(expected)


@given(cases())
@settings(max_examples=200, deadline=None)
def test_cut_sends_the_fewest_bytes_within_the_slack(case):
    loads, stages, crossing = case
    n = len(loads.work) - 1
    bound = smallest_bound(loads, stages) * SLACK
    fitting = [cuts for cuts in every_cut(n, stages) if largest(loads, cuts) <= bound]
    fewest = min(sum(crossing[c] for c in cuts[1:-1]) for cuts in fitting)
    found = cut(loads, stages, crossing)
    assert found in fitting
    assert sum(crossing[c] for c in found[1:-1]) == fewest


def test_a_stored_value_read_twice_counts_once_a_stage():
    builder = Builder()
    x = builder.input("x", (2, 2))
    weight = builder.param("w", torch.zeros(2, 2))
    for _ in range(4):
        x = builder.call("aten.mm.default", x, weight)
    loads = measure_loads(builder.finish(x))
    assert loads.stored_bytes(0, 4) == 16
    assert loads.stored_bytes(0, 2) + loads.stored_bytes(2, 4) == 32
    assert loads.stored_bytes(2, 2) == 0


def test_only_large_tables_that_nothing_else_reads_are_cut():
    assert find_tables(language_model(vocabulary=5000), 2, 0.1) == [0]
    assert find_tables(language_model(vocabulary=5000, tied=True), 2, 0.1) == []
    assert find_tables(language_model(vocabulary=5), 2, 0.1) == []
    assert find_tables(language_model(vocabulary=5000), 9, 0.1) == []  # 8 columns


def test_a_plan_cuts_a_table_that_would_fill_a_stage():
    graph = language_model(layers=8, vocabulary=1000, classes=2)
    made = plan(graph, 4)
    assert made.assignments[made.nodes[0]] == cut_table(graph, 0, ("d0", "d1", "d2", "d3"))
    assert made.assignments[made.nodes[0]].mesh.devices == ("d0", "d1", "d2", "d3")
    assert isinstance(made.assignments[made.nodes[0]].splits[0], Split)
    assert "cut by columns over all 4 slots: embed.weight" in made.notes[0]
    shares = [load.stored_bytes for load in made.loads]
    assert max(shares) < 0.3 * sum(shares)


@pytest.mark.parametrize("devices", [2, 4])
def test_a_plan_leaves_a_table_whole_that_fills_none(devices):
    made = plan(language_model(layers=8, vocabulary=20, classes=2), devices)
    assert all(assignment.mesh.ndim == 0 for assignment in made.assignments)
    assert made.notes == ()
