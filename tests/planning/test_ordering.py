"""Any parts become stages that nothing goes back in, none of them empty."""

from random import Random

from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from shardwright.planning.postprocess import as_stages, without_cycles
from shardwright.planning.workload import SentValue, Workload
from tests.planning.workloads import is_acyclic, random_parts, random_workload, workloads


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
