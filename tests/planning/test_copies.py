"""Operator replication: graphs with copies, and what is worth one."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import PlanError
from shardwright.ir import Builder
from shardwright.planning.assemble import copied, with_copies
from shardwright.planning.partition import worthwhile_copies
from shardwright.planning.plan import Copy
from shardwright.planning.postprocess import as_stages
from shardwright.planning.workload import SentValue, Workload
from tests.planning.workloads import merit, random_parts, workloads

# --- copies of nodes: the graph computes the same, and stages read their own ----------------------


def graph():
    """A mask that three products read, each after the other."""
    builder = Builder("masked")
    x = builder.input("x", (3, 3), "f64")
    mask = builder.call("aten.ones.default", [3, 3], dtype=torch.float64)
    lower = builder.call("aten.tril.default", mask)
    for _ in range(3):
        x = builder.call("aten.mul.Tensor", x, lower)
    return builder.finish(x)


STAGES = [0, 0, 0, 1, 2]
COPIES = (Copy(0, 2), Copy(1, 1), Copy(1, 2))


def test_each_stage_reads_its_own_copy_and_the_result_is_the_same():
    made, stages = with_copies(graph(), COPIES, STAGES)
    assert stages == [0, 2, 0, 1, 2, 0, 1, 2]
    assert [node.op.split(".")[1] for node in made.nodes] == [
        *("ones", "ones", "tril", "tril", "tril", "mul", "mul", "mul"),
    ]
    ones, ones2, tril, tril1, tril2, *products = made.nodes
    assert [node.inputs[0] for node in (tril, tril1, tril2)] == [
        ones.outputs[0],
        ones.outputs[0],
        ones2.outputs[0],
    ]
    assert [node.inputs[1] for node in products] == [
        node.outputs[0] for node in (tril, tril1, tril2)
    ]
    x = torch.rand(3, 3, dtype=torch.float64)
    assert torch.equal(made.run(x), graph().run(x))


def test_users_and_producers_are_those_of_the_nodes():
    made, _ = with_copies(graph(), COPIES, STAGES)
    for value in made.values.values():
        assert value.users == [node.id for node in made.nodes if value.id in node.inputs]
        makers = [node.id for node in made.nodes if value.id in node.outputs]
        assert makers == ([value.producer] if value.producer is not None else [])
    before = graph()
    assert {v: before.values[v].name for v in before.values}.items() <= {
        v: value.name for v, value in made.values.items()
    }.items()


def test_a_graph_is_written_again_from_the_stages_of_the_result():
    made, stages = with_copies(graph(), COPIES, STAGES)
    assert str(copied(graph(), COPIES, stages)) == str(made)
    assert copied(graph(), (), STAGES) == graph()


def test_stages_that_do_not_fit_the_copies_are_refused():
    with pytest.raises(PlanError, match="copy of node 1 in stage 2 is not where its stages have"):
        copied(graph(), COPIES, [0, 2, 0, 1, 1, 0, 1, 2])


# --- nodes that stages do again instead of receiving what they make -------------------------------


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
