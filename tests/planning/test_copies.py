"""Copies of nodes: the graph computes the same, and stages read their own."""

import pytest
import torch

from shardwright.errors import PlanError
from shardwright.ir import Builder
from shardwright.planning.copies import copied, with_copies
from shardwright.planning.plan import Copy


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
