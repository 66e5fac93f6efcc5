"""Sums kept up to date, against sums worked out anew from their definitions."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.planning.workload import Shares
from tests.planning.workloads import (
    kept_by,
    members,
    random_parts,
    seconds_of,
    sent_to,
    stored_by,
    workloads,
)


@given(workloads(), st.integers(0, 2**32), st.sampled_from([(0, 1, 2), (0, 1, 0), (0, 0, 1)]))
@settings(max_examples=60, deadline=None)
def test_moves_leave_what_is_worked_out_anew(workload, seed, ranks):
    random = Random(seed)
    stages = random_parts(random, workload, 3)
    shares = Shares.of(workload, stages, ranks)
    for _ in range(8):
        node, stage = random.randrange(len(workload)), random.randrange(3)
        shares.move(node, stage)
        stages[node] = stage
    found = members(stages, ranks)
    assert shares.stages == stages
    assert shares.nodes == [stages.count(stage) for stage in range(3)]
    assert shares.work == [sum(workload.seconds[i] for i in nodes) for nodes in found]
    assert shares.seconds == [seconds_of(workload, nodes) for nodes in found]
    assert shares.stored == [stored_by(workload, nodes) for nodes in found]
    assert shares.kept == [kept_by(workload, nodes) for nodes in found]
    assert shares.sent == pytest.approx(sum(sent_to(workload, nodes) for nodes in found))
    assert shares.crossing == 10 * shares.sent
