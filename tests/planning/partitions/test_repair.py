"""What is mended: messages that need not be."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.planning.copies import Copy
from shardwright.planning.partitions.ordering import as_stages
from shardwright.planning.partitions.repair import repair
from shardwright.planning.partitions.workload import SentValue, Workload
from tests.planning.workloads import is_acyclic, merit, random_parts, workloads


@given(workloads(most=10, least=3), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_mended_stages_are_no_worse(workload, seed):
    stages, _ = as_stages(workload, random_parts(Random(seed), workload, 3), 3)
    found = repair(workload, stages)
    assert is_acyclic(workload, found.stages)
    assert set(found.stages) == {0, 1, 2}
    assert merit(workload, found.stages, range(3)) <= merit(workload, stages, range(3))
    assert bool(found.notes) == (found.stages != stages or bool(found.copies))
    for copy in found.copies:
        assert copy.node in workload.repeatable
        assert copy.stage > found.stages[copy.node]
    assert without(workload, found) <= merit(workload, found.stages, range(3))[1]


def without(workload, found):
    """The seconds of messages where stages read their own copies."""
    copies = set(found.copies)
    readers = [{found.stages[reader] for reader in value.readers} for value in workload.sent]
    for copy in copies:
        for number, value in enumerate(workload.sent):
            if copy.node in value.readers:
                readers[number].add(copy.stage)
    return sum(
        value.seconds
        for value, stages in zip(workload.sent, readers, strict=True)
        for stage in stages
        if stage != found.stages[value.maker] and Copy(value.maker, stage) not in copies
    )


def workload(seconds, *sent, repeatable=()):
    names = tuple(f"n{i}" for i in range(len(seconds)))
    return Workload(names, tuple(seconds), sent, (), frozenset(repeatable))


def test_a_view_is_done_again_where_what_it_views_is_sent_anyway():
    given = workload(
        (5.0, 0.0, 5.0, 5.0),
        SentValue(0, (1, 2), 1.0, 1),
        SentValue(1, (3,), 2.0, 2),
        SentValue(2, (3,), 1.0, 1),
        repeatable={1},
    )
    found = repair(given, [0, 0, 1, 1])
    assert found.stages == [0, 1, 1, 1]
    given = workload(
        (5.0, 0.0, 5.0, 5.0, 5.0),
        SentValue(0, (1, 3), 1.0, 1),
        SentValue(1, (2, 3), 2.0, 2),
        SentValue(2, (3,), 1.0, 1),
        repeatable={1},
    )
    found = repair(given, [0, 0, 0, 1, 1])
    assert found.copies == [Copy(1, 1)]
    assert found.notes == [
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
    found = repair(given, [0, 0, 0, 1, 2])
    assert found.copies == [Copy(0, 1), Copy(0, 2), Copy(1, 1), Copy(1, 2)]


def test_what_takes_longer_than_to_send_it_is_sent():
    given = workload(
        (4.0, 5.0, 5.0), SentValue(0, (1, 2), 3.0, 3), SentValue(1, (2,), 1.0, 1), repeatable={0}
    )
    assert repair(given, [0, 0, 1]) == ([0, 0, 1], [], [])


def test_a_cheap_node_goes_where_it_saves_a_message():
    given = workload((9.0, 0.1, 1.0), SentValue(0, (1,), 1.0, 1), SentValue(1, (2,), 5.0, 5))
    found = repair(given, [0, 0, 1])
    assert found.stages == [0, 1, 1]
    assert found.notes == [
        "moved 1 node (n1) to where they save messages: 4000.000 ms less of them"
    ]


def test_no_stage_is_left_with_what_others_do_for_themselves_alone():
    given = workload((0.1, 5.0), SentValue(0, (1,), 3.0, 3), repeatable={0})
    assert repair(given, [0, 1]).copies == []
