"""Nodes that stages do again instead of receiving what they make."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.planning.copies import worthwhile_copies
from shardwright.planning.plan import Copy
from shardwright.planning.postprocess import as_stages
from shardwright.planning.workload import SentValue, Workload
from tests.planning.workloads import merit, random_parts, workloads


@given(workloads(most=10, least=3), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_copies_save_messages(workload, seed):
    stages, _ = as_stages(workload, random_parts(Random(seed), workload, 3), 3)
    copies, notes = worthwhile_copies(workload, stages)
    assert len(notes) == len({copy.stage for copy in copies})
    for copy in copies:
        assert copy.node in workload.repeatable
        assert copy.stage > stages[copy.node]
    assert without(workload, stages, copies) <= merit(workload, stages, range(3))[1]


def without(workload, stages, copies):
    """The seconds of messages where stages read their own copies."""
    readers = [{stages[reader] for reader in value.readers} for value in workload.sent]
    for copy in copies:
        for number, value in enumerate(workload.sent):
            if copy.node in value.readers:
                readers[number].add(copy.stage)
    return sum(
        value.seconds
        for value, reading in zip(workload.sent, readers, strict=True)
        for stage in reading
        if stage != stages[value.maker] and Copy(value.maker, stage) not in copies
    )


def workload(seconds, *sent, repeatable=()):
    names = tuple(f"n{i}" for i in range(len(seconds)))
    return Workload(names, tuple(seconds), sent, (), frozenset(repeatable))


def test_a_view_is_done_again_where_what_it_views_is_sent_anyway():
    given = workload(
        (5.0, 0.0, 5.0, 5.0, 5.0),
        SentValue(0, (1, 3), 1.0, 1),
        SentValue(1, (2, 3), 2.0, 2),
        SentValue(2, (3,), 1.0, 1),
        repeatable={1},
    )
    copies, notes = worthwhile_copies(given, [0, 0, 0, 1, 1])
    assert copies == [Copy(1, 1)]
    assert notes == [
        "stage 1 does 1 node (n1) again, which is quicker than to receive what they make"
    ]


def test_a_mask_made_step_by_step_is_made_again_in_each_stage_that_reads_it():
    given = workload(
        (0.1, 0.1, 5.0, 5.0, 5.0),
        SentValue(0, (1,), 3.0, 3),
        SentValue(1, (2, 3, 4), 3.0, 3),
        SentValue(2, (3,), 1.0, 1),
        SentValue(3, (4,), 1.0, 1),
        repeatable={0, 1},
    )
    copies, _ = worthwhile_copies(given, [0, 0, 0, 1, 2])
    assert copies == [Copy(0, 1), Copy(0, 2), Copy(1, 1), Copy(1, 2)]


def test_what_takes_longer_than_to_send_it_is_sent():
    given = workload(
        (4.0, 5.0, 5.0), SentValue(0, (1, 2), 3.0, 3), SentValue(1, (2,), 1.0, 1), repeatable={0}
    )
    assert worthwhile_copies(given, [0, 0, 1]) == ([], [])


def test_no_stage_is_left_with_what_others_do_for_themselves_alone():
    given = workload((0.1, 5.0), SentValue(0, (1,), 3.0, 3), repeatable={0})
    assert worthwhile_copies(given, [0, 1]) == ([], [])
