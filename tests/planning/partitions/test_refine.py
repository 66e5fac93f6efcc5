"""Refinement is never worse, and keeps stages in an order in which they can be done."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.planning.partitions.contiguous import MemoryLimit
from shardwright.planning.partitions.ordering import as_stages
from shardwright.planning.partitions.refine import refine
from shardwright.planning.partitions.workload import SentValue, Shares, Workload
from tests.planning.workloads import (
    acyclic_partitions,
    is_acyclic,
    merit,
    random_parts,
    workloads,
)

PLACES = ((0, 1), (0, 1, 2), (0, 1, 0))


@given(workloads(most=10, least=3), st.integers(0, 2**32), st.sampled_from(PLACES))
@settings(max_examples=60, deadline=None)
def test_refined_stages_are_no_worse(workload, seed, ranks):
    count = len(ranks)
    stages, _ = as_stages(workload, random_parts(Random(seed), workload, count), count)
    refined = refine(workload, stages, ranks=ranks)
    assert is_acyclic(workload, refined)
    assert set(refined) == set(range(count))
    assert merit(workload, refined, ranks) <= merit(workload, stages, ranks)


@given(workloads(most=7, least=3), st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_refined_bytes_are_no_more(workload, seed):
    stages, _ = as_stages(workload, random_parts(Random(seed), workload, 2), 2)

    def most(shares):
        return max(MemoryLimit(0, 4).held(shares))

    refined = refine(workload, stages, load=most)
    before, after = (most(Shares.of(workload, s, range(2))) for s in (stages, refined))
    assert after <= before


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
    best = min(merit(workload, p, range(2)) for p in acyclic_partitions(workload, 2))
    assert merit(workload, found, range(2)) == best


def test_a_stage_that_is_too_full_comes_first():
    values = tuple(SentValue(i, (3,), 1.0, 1, kept=10) for i in range(3))
    workload = Workload(tuple("abcd"), (0.0, 0.0, 0.0, 9.0), values)
    found = Shares.of(workload, refine(workload, [0, 0, 0, 1], limit=MemoryLimit(20)), range(2))
    assert max(found.kept) == 20


@pytest.mark.parametrize("stages", [[0], [0, 1]])
def test_where_nothing_can_move_nothing_does(stages):
    workload = Workload(tuple("ab")[: len(stages)], (1.0, 2.0)[: len(stages)])
    assert refine(workload, stages) == stages
