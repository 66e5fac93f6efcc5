"""Graphs cut anywhere, and numbers for partitions of nodes placed anyhow: laws."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardwright.codegenerate.splitting.stages import cut
from shardwright.codegenerate.stages import partition_numbers
from shardwright.errors import CodegenError
from tests.codegenerate.program_runs import ProgramRun, check_program, same
from tests.graphs import language_model
from tests.ir.random_graphs import random_graphs


@settings(deadline=None, max_examples=25)
@given(random_graphs(), st.data())
def test_stages_compute_what_the_graph_does_wherever_it_is_cut(random, data):
    graph = random.graph
    stored = [value.names for value in graph.stored()]
    assume(len(set(stored)) == len(stored))  # a checkpoint tells tensors apart by their names
    made: dict[int, int] = {}
    numbers = []
    for node in graph.nodes:
        least = max((made[v] for v in node.inputs if v in made), default=0)
        numbers.append(data.draw(st.integers(least, 4)))
        made |= dict.fromkeys(node.outputs, numbers[-1])
    try:
        program = cut(graph, numbers, training=False)
    except CodegenError:
        if not graph.updates:
            raise
        return
    check_program(program)
    run = ProgramRun(program)
    assert same(run.flat(random.inputs), random.outputs)
    assert same(
        [run.buffers()[graph.values[old].names[0]] for old in graph.updates], random.updates
    )


@settings(deadline=None, max_examples=25)
@given(random_graphs(), st.data())
def test_numbers_go_up_and_are_of_one_place_each(random, data):
    graph = random.graph
    count = len(graph.nodes)
    one_of = st.sampled_from([None, "a", "b", "c"])
    places = data.draw(st.lists(one_of, min_size=count, max_size=count))
    numbers = partition_numbers(graph, places)
    assert set(numbers) == set(range(len(set(numbers))))
    makers = {v: at for at, node in enumerate(graph.nodes) for v in node.outputs}
    for at, node in enumerate(graph.nodes):
        assert all(numbers[makers[v]] <= numbers[at] for v in node.inputs if v in makers)
    if not graph.updates:
        check_program(cut(graph, numbers, training=False))


def test_what_stands_on_one_place_has_one_number():
    graph = language_model(layers=2)
    half = len(graph.nodes) // 2
    for places in (["a", "b"], ["b", "a"], ["a", "a"]):
        placed = [places[0]] * half + [places[1]] * (len(graph.nodes) - half)
        numbers = partition_numbers(graph, placed)
        assert len(set(numbers)) == len(set(places))


def test_a_node_that_needs_what_comes_later_is_refused():
    graph = language_model(layers=1)
    numbers = [1] + [0] * (len(graph.nodes) - 1)
    with pytest.raises(CodegenError, match="of partition 1; plan so that nothing needs"):
        cut(graph, numbers, training=False)


def test_contents_are_the_graphs_own():
    graph = language_model(layers=1)
    program = cut(graph, [0] * len(graph.nodes), training=False)
    ((stage,),) = program.partitions
    own = {id(tensor) for tensor in graph.tensors.values()}
    assert {id(tensor) for tensor in stage.graph.tensors.values()} == own
    assert all(isinstance(tensor, torch.Tensor) for tensor in stage.graph.tensors.values())
