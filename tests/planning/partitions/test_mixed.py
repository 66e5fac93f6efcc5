"""Mixed pipes: several stages a rank."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.planning.partitions.exact import contiguous
from shardwright.planning.partitions.mixed import mixed
from shardwright.planning.partitions.workload import Workload
from tests.planning.workloads import is_acyclic, merit, workloads


@given(workloads(most=10, least=4), st.sampled_from([None, (0, 1, 0, 1), (0, 1, 1, 0)]))
@settings(max_examples=40, deadline=None)
def test_ranks_are_no_busier_than_with_stages_in_rounds(workload, placement):
    stages, ranks = mixed(workload, 2, 2, placement=placement)
    assert is_acyclic(workload, stages)
    assert set(stages) == {0, 1, 2, 3}
    assert set(ranks) == {0, 1}
    assert placement in (None, tuple(ranks))
    rounds = placement or (0, 1, 0, 1)
    assert merit(workload, stages, ranks) <= merit(workload, contiguous(workload, 4), rounds)


def test_a_rank_with_a_heavy_stage_gets_a_light_one():
    workload = Workload(tuple("abcd"), (9.0, 1.0, 8.0, 2.0))
    stages, ranks = mixed(workload, 2, 2)
    loads = [0.0, 0.0]
    for stage, seconds in zip(stages, workload.seconds, strict=True):
        loads[ranks[stage]] += seconds
    assert loads == [10.0, 10.0]
