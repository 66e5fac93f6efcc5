"""Every row of the catalog, split in every way, run in parts and put together again."""

import itertools
from functools import cache

import pytest
import torch

from shardwright.ir import resolve
from shardwright.ops import even_cuts
from shardwright.ops.catalog import ROWS, dimop_of
from tests.ops.calls import CASES
from tests.ops.splitting import check, gradients, join, run_graph_of_parts, run_whole, sliced

UNDEFINED = ("empty_like.default", "empty.memory_format", "new_empty.default")
# torch 2.9 has no derivative of these.
NEWLY_DIFFERENTIABLE = ("nextafter.default", "aminmax.default")
LEFT_OUT = UNDEFINED if torch.__version__ >= "2.13" else UNDEFINED + NEWLY_DIFFERENTIABLE
DEFINED = [case for case in CASES if not case.op.endswith(LEFT_OUT)]


def name_of(case):
    return case.op.removeprefix("aten.")


@cache
def bound_call(index):
    """The dimensions of a case's call, and its inputs, outputs and gradients."""
    graph, inputs = DEFINED[index].make()
    outputs = run_whole(graph, inputs)
    return dimop_of(graph, graph.nodes[-1]), inputs, outputs, gradients(outputs, inputs)


each_call = pytest.mark.parametrize("index", range(len(DEFINED)), ids=map(name_of, DEFINED))


@each_call
def test_parts_of_a_call_join_to_the_whole(index):
    bound, *whole = bound_call(index)
    for identifier in bound.identifiers:
        for num in (2, 3, 4):
            if num <= bound.length(identifier):
                parts = bound.split(identifier, num)
                check(bound, parts, *whole)
                check_flow(bound, identifier, parts[0])
    for pair in itertools.combinations(bound.identifiers, 2):
        halves = [even_cuts(bound.length(identifier), 2) for identifier in pair]
        cuts = [dict(zip(pair, both, strict=True)) for both in itertools.product(*halves)]
        check(bound, [bound.part(cut) for cut in cuts], *whole)


def check_flow(bound, identifier, part):
    """What a flow says of layouts is what a part's slices are."""
    flow = bound.flow(identifier)
    carries = (*flow.inputs, *flow.outputs)
    shapes = (*bound.call.inputs, *bound.call.outputs)
    for carry, where, shape in zip(carries, (*part.inputs, *part.outputs), shapes, strict=True):
        assert (carry.kind == "any") == (where is None)
        if where is not None:
            cut = [dim for dim, size in enumerate(shape) if where.ranges[dim] != (0, size)]
            assert cut == ([carry.dim] if carry.kind == "shard" else [])
            assert (carry.kind == "partial") == (where.partial is not None)
            assert all(where.ranges[dim][1] % carry.unit == 0 for dim in cut)


def test_parts_written_into_a_graph_compute_what_they_compute_at_once():
    for index in range(len(DEFINED)):
        bound, inputs, outputs, _ = bound_call(index)
        if bound.rule.emit is not None or bound.rule.attrs is not None:
            for identifier in bound.identifiers:
                parts = bound.split(identifier, 2)
                made = join(bound, parts, run_graph_of_parts(parts, inputs))
                assert_same(bound, made, outputs)


def test_an_operator_is_linear_where_its_row_says_so():
    for index in range(len(DEFINED)):
        bound, inputs, outputs, _ = bound_call(index)
        whole = bound.part({})
        for together in bound.linear:
            terms = [torch.randn_like(x) if i in together else x for i, x in enumerate(inputs)]
            rests = [x - terms[i] if i in together else x for i, x in enumerate(inputs)]
            sums = [a + b for a, b in zip(whole.run(terms), whole.run(rests), strict=True)]
            assert_same(bound, sums, outputs)


def assert_same(bound, made, outputs):
    for got, expected in zip(made, outputs, strict=True):
        torch.testing.assert_close(
            got, expected, rtol=1e-9, atol=1e-9, msg=lambda message: f"{bound}: {message}"
        )


@pytest.mark.parametrize("case", [c for c in CASES if c.op.endswith(UNDEFINED)], ids=name_of)
def test_parts_without_defined_contents_have_their_shapes(case):
    graph, inputs = case.make()
    bound = dimop_of(graph, graph.nodes[-1])
    for identifier in bound.identifiers:
        for part in bound.split(identifier, 3):
            (made,) = part.run(list(map(sliced, inputs, part.inputs)))
            assert tuple(made.shape) == part.outputs[0].shape


def test_every_row_has_a_case():
    ours = {op for op, row in ROWS.items() if row.rule and not op.startswith("transformers.")}
    assert ours == {case.op for case in CASES}


def test_every_row_names_an_operator():
    for op in ROWS:
        if not op.startswith("transformers.") and "_attention" not in op:
            resolve(op)
