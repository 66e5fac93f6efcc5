"""How many microbatches a stage holds, by schedule."""

import pytest

from shardwright.planning.stages import MemoryLimit
from shardwright.planning.workload import SentValue, Shares, StoredValue, Workload


@pytest.mark.parametrize(
    ("schedule", "chunks", "expected"),
    [
        ("gpipe", 1, [8, 8]),
        ("1f1b", 1, [2, 1]),
        ("zb-h1", 1, [2, 2]),
        ("interleaved", 2, [4, 3, 2, 1]),
        ("zb-v", 2, [4, 3, 2, 1]),
    ],
)
def test_schedules_hold_different_numbers_of_microbatches(schedule, chunks, expected):
    limit = MemoryLimit(1.0, 8, schedule, chunks)
    stages = len(expected)
    found = [limit.under_way(stage, stages) for stage in range(stages)]
    assert found == expected


def test_a_rank_holds_its_stored_values_once_and_what_is_under_way():
    sent = (
        SentValue(0, (1,), 1.0, 1, kept=10, arrived=5),
        SentValue(1, (2,), 1.0, 1, kept=100, arrived=50),
    )
    workload = Workload(tuple("abc"), (1.0,) * 3, sent, (StoredValue((0, 2), 1000),))
    shares = Shares.of(workload, [0, 1, 2], range(3))
    assert MemoryLimit(0.0, 8).held(shares) == [1000 + 3 * 10, 2 * 105, 1000 + 50]
    chunked = Shares.of(workload, [0, 0, 1], (0, 0))
    assert MemoryLimit(0.0, 1, "interleaved", 2).held(chunked) == [1000 + 110]
