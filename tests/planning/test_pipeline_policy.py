"""The pipeline policy: the cut against exhaustive search, lookup tables."""

from itertools import combinations, pairwise

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
)
from shardwright.planning.workload import StoredValue, Workload
from tests.graphs import language_model

# --- the cut is held against exhaustive search on small sequences ---------------------------------


def every_cut(n, stages):
    for inner in combinations(range(1, n), stages - 1):
        yield [0, *inner, n]


def largest(table, cuts):
    return max(table[start, stop] for start, stop in pairwise(cuts))


@st.composite
def cases(draw):
    n = draw(st.integers(1, 9))
    sizes = st.integers(0, 20)
    work = draw(st.lists(sizes, min_size=n, max_size=n))
    readers = st.sets(st.integers(0, n - 1), min_size=1, max_size=4).map(sorted).map(tuple)
    stored = draw(st.lists(st.builds(StoredValue, readers, sizes), max_size=n))
    crossing = draw(st.lists(st.integers(0, 50), min_size=n + 1, max_size=n + 1))
    total = sum(value.nbytes for value in stored)
    nodes = Workload(("",) * n, tuple(work), stored=tuple(stored))
    loads = Loads(nodes, max(sum(work), 1), max(total, 1), draw(st.integers(0, 5)))
    return loads, draw(st.integers(1, n)), crossing


@given(cases())
@settings(max_examples=200, deadline=None)
def test_cut_sends_the_fewest_bytes_within_the_slack(case):
    loads, stages, crossing = case
    n = len(loads.nodes)
    table = loads.table(range(n + 1))
    bound = min(largest(table, cuts) for cuts in every_cut(n, stages)) * SLACK
    fitting = [cuts for cuts in every_cut(n, stages) if largest(table, cuts) <= bound]
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
    assert loads.total_bytes == 16
    assert largest(loads.table(range(5)), [0, 4]) == 1
    assert loads.table(range(5))[0, 2] == loads.table(range(5))[2, 4] == 1
    assert loads.after(2).table(range(3))[0, 2] == 1


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
