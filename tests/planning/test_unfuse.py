"""Fused products: found, and taken apart."""

import pytest
import torch

from shardwright.errors import PlanError
from shardwright.ir import Builder
from shardwright.ir.operators import is_marker
from shardwright.ir.validate import validate
from shardwright.planning.fusions import find_fusions
from shardwright.planning.unfuse import unfuse
from tests.planning.projections import (
    addmm,
    attending,
    interleaved,
    linear,
    rand,
    stacked,
    thirds,
    transformer,
)
from tests.steps import trained


def parts_of(graph):
    return {position: fusion.parts for position, fusion in find_fusions(graph).items()}


@pytest.mark.parametrize("taken", [thirds, stacked])
def test_columns_that_are_taken_apart_are_parts(taken):
    assert parts_of(attending(linear, taken)) == {0: [(0, 16), (16, 32), (32, 48)]}


def test_views_between_are_followed():
    assert parts_of(attending(addmm, thirds)) == {1: [(0, 16), (16, 32), (32, 48)]}


def test_a_product_whose_heads_are_outermost_is_not_fused():
    assert parts_of(attending(linear, interleaved)) == {}


def gated(takings, *, keep=False):
    """A projection to 8 columns and what is taken of it."""
    builder = Builder("gated")
    x = builder.input("x", (3, 4), "f64")
    y = linear(builder, x, "up", 8)
    made = [builder.call(f"aten.{op}", y, *args) for op, *args in takings]
    outputs = [value for item in made for value in (item if isinstance(item, list) else [item])]
    return builder.finish([*outputs, y] if keep else outputs)


SLICE = "slice.Tensor"


@pytest.mark.parametrize(
    ("takings", "parts"),
    [
        ([("chunk.default", 2, -1)], [(0, 4), (4, 8)]),
        ([("split_with_sizes.default", [5, 2, 1], 1)], [(0, 5), (5, 7), (7, 8)]),
        ([(SLICE, 1, 0, 3), (SLICE, -1, -5, 2**63 - 1)], [(0, 3), (3, 8)]),
        ([(SLICE, 1, 0, 3), (SLICE, 1, 4, 6), (SLICE, 1, 0, 3)], [(0, 3), (4, 6)]),
        ([("narrow.default", 1, 2, 2), ("select.int", 1, -1)], [(2, 4), (7, 8)]),
        ([("unbind.int", 1)], [(i, i + 1) for i in range(8)]),
    ],
)
def test_takings_along_the_columns(takings, parts):
    assert parts_of(gated(takings)) == {0: parts}


@pytest.mark.parametrize(
    "takings",
    [
        [(SLICE, 1, 0, 5), (SLICE, 1, 4, 8)],  # they overlap
        [(SLICE, 1, 0, 8, 2), (SLICE, 1, 1, 8, 2)],  # every other column
        [(SLICE, 1, 0, 4), ("relu.default",)],  # something reads all of it
        [("chunk.default", 2, 0)],  # rows, not columns
        [(SLICE, 1, 2, 6)],  # one part
    ],
)
def test_what_is_not_taken_apart(takings):
    assert parts_of(gated(takings)) == {}


def test_a_returned_product_stays():
    assert parts_of(gated([("chunk.default", 2, 1)], keep=True)) == {}


def test_a_weight_that_something_else_reads_stays():
    builder = Builder()
    x = builder.input("x", (3, 4), "f64")
    weight = builder.param("w", rand(8, 4))
    halves = builder.call(
        "aten.chunk.default", builder.call("aten.linear.default", x, weight), 2, 1
    )
    norm = builder.call("aten.sum.default", weight)
    assert parts_of(builder.finish([*halves, norm])) == {}


def test_a_weight_of_two_fused_products_is_taken_apart_in_both():
    builder = Builder()
    x = builder.input("x", (3, 4), "f64")
    weight = builder.param("w", rand(8, 4))
    outputs = []
    for _ in range(2):
        y = builder.call("aten.linear.default", x, weight)
        outputs += builder.call("aten.chunk.default", y, 2, 1)
    assert parts_of(builder.finish(outputs)) == {0: [(0, 4), (4, 8)], 2: [(0, 4), (4, 8)]}


def test_what_is_updated_after_a_run_stays():
    builder = Builder()
    x = builder.input("x", (3, 4), "f64")
    weight = builder.buffer("w", rand(8, 4))
    halves = builder.call(
        "aten.chunk.default", builder.call("aten.linear.default", x, weight), 2, 1
    )
    new = builder.call("aten.mul.Tensor", weight, 0.5)
    assert parts_of(builder.finish(halves, updates={weight.id: new.id})) == {}


def test_products_of_inputs_are_not_looked_at():
    builder = Builder()
    x, y = builder.input("x", (3, 4), "f64"), builder.input("y", (4, 8), "f64")
    halves = builder.call("aten.chunk.default", builder.call("aten.mm.default", x, y), 2, 1)
    assert parts_of(builder.finish(halves)) == {}


def test_all_layers_are_found():
    graph = transformer(layers=5)
    assert len(find_fusions(graph)) == 5
    assert torch.is_tensor(graph.run(torch.zeros(2, 6, dtype=torch.int64)))


TOLERANCE = 1e-12


def assert_close(found, expected):
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("product", [linear, addmm])
@pytest.mark.parametrize("taken", [thirds, stacked])
def test_parts_compute_what_the_whole_did(product, taken):
    graph = attending(product, taken)
    apart = unfuse(graph)
    x = rand(2, 6, 16)
    assert_close(apart.run(x), graph.run(x))
    assert (
        len(
            [
                node
                for node in apart.nodes
                if node.op in ("aten.linear.default", "aten.addmm.default")
            ]
        )
        == 4
    )
    validate(apart)


def test_parts_are_ranges_of_the_stored_tensors():
    graph = attending(addmm, thirds)
    apart = unfuse(graph)
    stored = {value.placements: value for value in apart.stored() if "qkv.weight" in value.names}
    assert list(stored) == [((0, 16), (start, start + 16)) for start in (0, 16, 32)]
    whole = next(graph.tensors[value.id] for value in graph.stored() if value.name == "qkv.weight")
    for (_, (start, end)), value in stored.items():
        tensor = apart.tensors[value.id]
        assert tensor.data_ptr() == whole[:, start:].data_ptr(), "a view, not a copy"
        assert torch.equal(tensor, whole[:, start:end])


def test_ranges_of_a_range_are_ranges_of_the_stored_tensor():
    builder = Builder()
    x = builder.input("x", (3, 4), "f64")
    weight = builder.param("w", rand(8, 4), placements=((10, 18), (0, 4)))
    halves = builder.call(
        "aten.chunk.default", builder.call("aten.linear.default", x, weight), 2, 1
    )
    apart = unfuse(builder.finish(halves))
    placements = [value.placements for value in apart.stored()]
    assert placements == [((10, 14), (0, 4)), ((14, 18), (0, 4))]


def test_a_weight_of_several_products_is_cut_once():
    builder = Builder()
    x = builder.input("x", (3, 4), "f64")
    weight = builder.param("w", rand(8, 4))
    outputs = []
    for _ in range(2):
        y = builder.call("aten.linear.default", x, weight)
        outputs += builder.call("aten.chunk.default", y, 2, 1)
    graph = builder.finish(outputs)
    apart = unfuse(graph)
    assert len(list(apart.stored())) == 2
    x = rand(3, 4)
    for found, expected in zip(apart.run(x), graph.run(x), strict=True):
        assert_close(found, expected)


def test_ends_names_and_places_stay():
    builder = Builder("model")
    x = builder.input("x", (3, 4), "f64")
    unread = builder.buffer("unread", rand(2))
    with builder.scope("up", "tests.Up"):
        y = linear(builder, x, "up", 8)
    halves = builder.call("aten.chunk.default", y, 2, 1)
    counted = builder.call("aten.add.Tensor", unread, 1.0)
    graph = builder.finish(halves, updates={unread.id: counted.id})
    apart = unfuse(graph)
    assert apart.name == "model"
    assert apart.in_structure == graph.in_structure
    assert apart.out_structure == graph.out_structure
    assert {apart.values[old].name for old in apart.updates} == {"unread"}
    assert [node.scope for node in apart.nodes if node.op == "aten.linear.default"] == ["up", "up"]


def test_a_graph_without_fused_products_is_handed_back():
    graph, fused = attending(linear, interleaved), transformer()
    assert unfuse(graph) is graph
    assert unfuse(fused, ()) is fused


def test_only_the_products_asked_for_are_taken_apart():
    graph = transformer(layers=3)
    first, *_, last = find_fusions(graph)
    assert len(find_fusions(unfuse(graph, [first, last]))) == 1
    assert find_fusions(unfuse(graph)) == {}


def test_a_position_without_a_fused_product_is_refused():
    with pytest.raises(PlanError, match="node 0 of 'transformer' is no fused product; plan again"):
        unfuse(transformer(), [0])


def test_many_layers_compute_the_same():
    graph = transformer(layers=4, product=linear, taken=stacked)
    tokens = torch.randint(0, 50, (2, 6))
    assert_close(unfuse(graph).run(tokens), graph.run(tokens))


@pytest.mark.parametrize("clipped", [False, True])
def test_parts_of_a_step_have_their_own_gradients_states_and_updates(clipped):
    graph = trained(attending(addmm, thirds), clip=clipped)
    apart = unfuse(graph)
    validate(apart)
    markers = {node.op: node for node in apart.nodes if is_marker(node.op)}
    names = markers["Backward"].attrs["parameters"]
    assert [names.count(f"qkv.{end}") for end in ("weight", "bias")] == [3, 3]
    assert markers["adamw_step"].attrs["parameters"] == names
    shapes = [apart.values[v].shape for v in markers["Backward"].outputs]
    assert shapes.count((16, 16)) == 3 + 1  # and the output's
    assert shapes.count((16,)) == 3 + 1
    count = len(names)
    old = markers["adamw_step"].inputs[1:]
    lists = [old[start : start + count] for start in range(0, len(old), count)]
    parameters, gradients, averages, squares, steps = lists
    for listed in (gradients, averages, squares):
        assert [apart.values[v].shape for v in listed] == [
            apart.values[v].shape for v in parameters
        ]
    placements = [apart.values[v].placements for v in parameters]
    assert [apart.values[v].placements for v in averages] == placements
    assert {apart.values[v].init for v in (*averages, *squares, *steps)} == {"zeros"}
    assert {*apart.updates} == {*parameters, *averages, *squares, *steps}


def test_a_weight_that_a_step_updates_is_taken_apart_only_as_a_whole():
    """Where a third of the columns is never read, there would be no gradient for it."""

    def two_thirds(builder, y, heads):
        batch, length, columns = y.shape
        width, parts = columns // 3, []
        for start in (0, width):
            part = builder.call("aten.slice.Tensor", y, 2, start, start + width)
            part = builder.call("aten.view.default", part, [batch, length, heads, width // heads])
            parts.append(builder.call("aten.transpose.int", part, 1, 2))
        return [parts[0], parts[1], parts[1]]

    graph = attending(addmm, two_thirds)
    assert find_fusions(graph)
    assert not find_fusions(trained(graph))


def test_an_operator_between_markers_is_done_to_each_part():
    graph = trained(attending(addmm, thirds), halve=True)
    apart = unfuse(graph)
    halves = [node for node in apart.nodes if node.op == "aten.mul.Scalar"]
    assert len(halves) == len(next(n for n in apart.nodes if n.op == "Backward").outputs)
