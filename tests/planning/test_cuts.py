"""Whether a cut can fit at all is seen without a search, and never denied wrongly."""

from itertools import combinations, pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.planning.cuts import _may_fit

amounts = st.lists(st.integers(0, 9), min_size=5, max_size=5)


def table(stored, kept, held, memory):
    """From where to where a stage fits that holds so many microbatches."""
    total = np.concatenate([[0], np.cumsum(np.array(stored) + held * np.array(kept))])
    return total[None, :] - total[:, None] <= memory


def fits_somewhere(tables):
    """Whether any cut fits, one after another: as slow as can be."""
    nodes = len(tables[0]) - 1
    return any(
        all(
            found[bounds]
            for found, bounds in zip(tables, pairwise([0, *inner, nodes]), strict=True)
        )
        for inner in combinations(range(1, nodes), len(tables) - 1)
    )


@settings(max_examples=200, deadline=None)
@given(amounts, amounts, st.lists(st.integers(0, 4), min_size=1, max_size=3), st.integers(0, 90))
def test_what_fits_somewhere_may_fit(stored, kept, held, memory):
    tables = [table(stored, kept, count, memory) for count in held]
    if fits_somewhere(tables):
        assert _may_fit(tables)


def test_a_node_that_fits_nowhere_is_seen():
    tables = [table([1, 9, 1, 1, 1], [0] * 5, 0, 5)] * 3
    assert not _may_fit(tables)
    assert _may_fit([table([1, 5, 1, 1, 1], [0] * 5, 0, 5)] * 3)
