"""Stages of any parts, and their refinement."""

from random import Random

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from shardwright.planning.postprocess import as_stages, refine, without_cycles
from shardwright.planning.workload import SentValue, Shares, Workload
from tests.planning.workloads import (
    acyclic_partitions,
    is_acyclic,
    random_parts,
    random_workload,
    workloads,
)

# --- any parts become stages that nothing goes back in, none of them empty ------------------------


@given(workloads(most=12), st.integers(0, 2**32), st.integers(1, 10))
@settings(max_examples=60, deadline=None)
def test_any_parts_become_stages(workload, seed, count):
    assume(count <= len(workload))
    stages, _ = as_stages(workload, random_parts(Random(seed), workload, count), count)
    assert len(stages) == len(workload)
    assert set(stages) == set(range(count))
    assert is_acyclic(workload, stages)


@given(workloads(most=12), st.integers(0, 2**32), st.integers(1, 4))
@example(random_workload(Random(19172721), 1, 12), 286, 3)  # a node without work stays, too
@settings(max_examples=40, deadline=None)
def test_what_is_in_order_stays(workload, seed, count):
    stages = sorted(random_parts(Random(seed), workload, count))
    assert without_cycles(workload, stages) == (stages, [])


def chain(*seconds):
    sent = tuple(SentValue(i, (i + 1,), 1.0, 1) for i in range(len(seconds) - 1))
    return Workload(tuple(f"n{i}" for i in range(len(seconds))), seconds, sent)


def test_parts_are_numbered_as_data_flows():
    found, notes = as_stages(chain(1.0, 1.0, 1.0, 1.0), [2, 2, 0, 1], 3)
    assert found == [0, 0, 1, 2]
    assert notes == ["parts numbered anew, as data flows: 2, 0, 1"]
    assert as_stages(chain(1.0, 1.0, 1.0, 1.0), [0, 0, 1, 2], 3) == ([0, 0, 1, 2], [])


def test_a_cycle_is_ended_by_a_move_which_is_told():
    stages, notes = as_stages(chain(1.0, 1.0, 1.0, 1.0), [0, 1, 0, 1], 2)
    assert is_acyclic(chain(1.0, 1.0, 1.0, 1.0), stages)
    (note,) = notes
    assert note.startswith("moved 1 node (n")
    assert note.endswith(": they needed each other")


def test_a_part_without_nodes_gets_half_of_the_largest():
    stages, notes = as_stages(chain(1.0, 1.0, 5.0, 5.0), [0, 0, 1, 1], 3)
    assert stages == [0, 0, 1, 2]
    assert notes == ["cut a stage in two: only 2 of 3 stages had nodes"]


# --- refinement is never worse, and keeps stages in an order in which they can be done ------------


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
