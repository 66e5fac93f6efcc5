import pytest

from shardwright.planner import plan
from shardwright.planning import Split
from shardwright.planning.pipeline import cut_table, find_tables
from tests.graphs import language_model


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
