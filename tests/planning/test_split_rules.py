"""The built-in splits, by the communication that they lead to."""

from collections import Counter

import pytest

from shardwright.building.localize import localize
from shardwright.ir import Builder
from shardwright.planner import plan
from shardwright.planning.rules import data, take_apart, tensor
from shardwright.planning.unfuse import unfuse
from tests.planning.projections import (
    addmm,
    interleaved,
    linear,
    rand,
    stacked,
    thirds,
    transformer,
)


def communication(graph, policy, devices):
    made = plan(graph, devices, policy=policy)
    return Counter(c.kind for c in localize(unfuse(graph, made.unfused), made).communications)


def a_layer(policy, devices, **options):
    """The communication that one layer more takes."""
    few, many = transformer(2, **options), transformer(3, **options)
    more = communication(many, policy, devices)
    more.subtract(communication(few, policy, devices))
    return +more


PROJECTIONS = [(addmm, thirds), (linear, stacked), (linear, interleaved)]


@pytest.mark.parametrize(("product", "taken"), PROJECTIONS)
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_a_block_has_two_reductions_under_tensor(product, taken, devices):
    assert a_layer("tensor", devices, product=product, taken=taken) == {"all_reduce": 2}


@pytest.mark.parametrize(("product", "taken"), PROJECTIONS)
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_a_block_has_two_gathers_and_two_scatters_under_sequence(product, taken, devices):
    expected = {"all_gather": 2, "reduce_scatter": 2}
    assert a_layer("sequence", devices, product=product, taken=taken) == expected


def test_ends_of_a_language_model_reduce_once_and_leave_the_result_split():
    assert communication(transformer(2), "tensor", 4) == {"all_reduce": 5}


def test_data_needs_no_communication():
    assert communication(transformer(2, batch=4), "data", 4) == {}


@pytest.mark.parametrize("policy", ["tensor", "sequence"])
def test_no_slot_holds_more_than_its_share(policy):
    graph = transformer(8, width=64)
    total = sum(value.nbytes for value in graph.stored())
    made = plan(graph, 4, policy=policy)
    slots = localize(unfuse(graph, made.unfused), made).slots
    for slot in slots.values():
        assert sum(value.nbytes for value in slot.builder.graph.stored()) < 0.3 * total


def test_a_tied_table_is_split_by_the_same_dimension_for_all_that_read_it():
    graph = transformer(2, batch=64)  # so that the lookup's result is larger than the table
    apart, _ = take_apart(graph, {"tensor": 2})
    following = tensor(apart, 2)
    table = next(value for value in apart.stored() if value.name == "embed.weight")
    readers = [node for node in apart.nodes if table.id in node.inputs]
    read = [
        following.bound(node).flow(following.chosen[node.id][0]).inputs[node.inputs.index(table.id)]
        for node in readers
    ]
    assert [(carry.kind, carry.dim) for carry in read] == [("shard", 0)] * 2


def two_layers(*between, width=8, columns=8):
    builder = Builder()
    y = linear(builder, builder.input("x", (6, width), "f64"), "up", columns)
    for op, *args in between:
        y = builder.call(op, y, *args)
    return builder.finish(linear(builder, y, "down", 64))


def test_columns_that_would_be_gathered_at_once_stay_whole_where_they_are_few():
    graph = two_layers(("aten.softmax.int", -1), width=2)
    assert communication(graph, "tensor", 2) == {}
    assert tensor(graph, 2).splits()[0] is None


def test_columns_that_would_be_gathered_at_once_are_split_where_they_are_many():
    graph = two_layers(("aten.softmax.int", -1), width=64)
    assert communication(graph, "tensor", 2) == {"all_gather": 1}


def test_columns_are_followed_by_rows():
    assert communication(two_layers(("aten.relu.default",)), "tensor", 2) == {"all_reduce": 1}


def test_a_product_whose_parts_would_be_summed_stays_fused():
    builder = Builder()
    y = linear(builder, builder.input("x", (6, 8), "f64"), "up", 32)
    parts = builder.call("aten.chunk.default", linear(builder, y, "down", 16), 2, -1)
    graph = builder.finish(parts)
    apart, positions = take_apart(graph, {"tensor": 2})
    assert positions == ()
    assert apart is graph
    assert communication(graph, "tensor", 2) == {"all_reduce": 1}


@pytest.mark.parametrize("axes", [{"pipeline": 2}, {"data": 2}, {"tensor": 1}])
def test_only_axes_that_split_columns_take_products_apart(axes):
    graph = transformer(2)
    assert take_apart(graph, axes) == (graph, ())
    assert plan(graph, mesh=axes).unfused == ()


def test_the_batch_is_found_by_its_length():
    builder = Builder()
    x, shift = builder.input("x", (8, 4), "f64"), builder.input("shift", (4,), "f64")
    weight = builder.param("w", rand(4, 4))
    y = builder.call("aten.linear.default", builder.call("aten.add.Tensor", x, shift), weight)
    following = data(builder.finish(y), 2)
    assert [split.identifier for split in following.splits()] == ["a", "a"]
