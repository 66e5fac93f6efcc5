"""Refinement is never worse, and keeps stages in an order in which they can be done."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.planning.postprocess import as_stages, refine
from shardwright.planning.workload import SentValue, Shares, Workload
from tests.planning.workloads import (
    acyclic_partitions,
    is_acyclic,
    random_parts,
    workloads,
)


def worth(workload, stages, allowed=0.0):
    shares = Shares.of(workload, stages, range(max(stages) + 1))
    return max(allowed, *shares.work), shares.sent


@given(workloads(most=10, least=3), st.integers(0, 2**32), st.integers(2, 3), st.integers(0, 60))
@settings(max_examples=60, deadline=None)
def test_refined_stages_are_no_worse(workload, seed, count, allowed):
    stages, _ = as_stages(workload, random_parts(Random(seed), workload, count), count)
    refined = refine(workload, stages, allowed)
    assert is_acyclic(workload, refined)
    assert set(refined) == set(range(count))
    assert worth(workload, refined, allowed) <= worth(workload, stages, allowed)


def pairs(count):
    """Pairs of nodes that belong together, one pair after another."""
    sent = []
    for i in range(0, 2 * count, 2):
        sent.append(SentValue(i, (i + 1,), 5.0, 5))
        if i:
            sent.append(SentValue(i - 1, (i,), 1.0, 1))
    return Workload(tuple(map(str, range(2 * count))), (1.0,) * 2 * count, tuple(sent))


def test_nodes_that_belong_together_go_over_together():
    """One by one they would make it worse."""
    workload = pairs(4)
    found = refine(workload, [0, 0, 0, 0, 0, 0, 1, 1])
    assert found == [0, 0, 0, 0, 1, 1, 1, 1]
    best = min(worth(workload, p) for p in acyclic_partitions(workload, 2))
    assert worth(workload, found) == best


@pytest.mark.parametrize("stages", [[0], [0, 1]])
def test_where_nothing_can_move_nothing_does(stages):
    workload = Workload(tuple("ab")[: len(stages)], (1.0, 2.0)[: len(stages)])
    assert refine(workload, stages) == stages
