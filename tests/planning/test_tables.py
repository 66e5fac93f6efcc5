import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import PlanError
from shardwright.planning import TableSplit, plan
from shardwright.planning.tables import even_ranges, find_tables, split_tables
from tests.graphs import language_model, tokens


@given(st.integers(0, 1000), st.integers(1, 12))
def test_even_ranges_join_to_the_whole_larger_first(size, parts):
    ranges = even_ranges(size, parts)
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(size))
    lengths = [stop - start for start, stop in ranges]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_a_cut_table_gives_the_same_rows(parts):
    graph = language_model()
    split = split_tables(graph, [TableSplit(0, parts)])
    assert torch.equal(split.run(tokens()), graph.run(tokens()))
    pieces = [value for value in split.stored() if value.names == ("embed.weight",)]
    assert [value.placements[1] for value in pieces] == even_ranges(8, parts)
    assert sum(value.nbytes for value in pieces) == 50 * 8 * 8


def test_only_large_tables_that_nothing_else_reads_are_cut():
    assert find_tables(language_model(vocabulary=5000), 2, 0.1) == [0]
    assert find_tables(language_model(vocabulary=5000, tied=True), 2, 0.1) == []
    assert find_tables(language_model(vocabulary=5), 2, 0.1) == []
    assert find_tables(language_model(vocabulary=5000), 9, 0.1) == []  # 8 columns


def test_a_plan_cuts_a_table_that_would_fill_a_stage():
    assert plan(language_model(layers=8, vocabulary=60, classes=2), 2).table_splits == ()
    split = plan(language_model(layers=8, vocabulary=1000, classes=2), 4)
    assert split.table_splits == (TableSplit(node=0, parts=4),)
    assert "cut by columns over all 4 slots: embed.weight" in split.notes[0]
    assert [stage.nodes[0] for stage in split.stages] == [0, 1, 2, 3]


def test_a_split_where_no_lookup_is_is_refused():
    with pytest.raises(PlanError, match="cuts a lookup table at node 1, where none is"):
        split_tables(language_model(), [TableSplit(1, 2)])
