"""Chains of cuts through tables."""

import numpy as np
import pytest

from shardwright.errors import PlanError
from shardwright.planning.stages import MemoryLimit, Tables, best_chain


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
