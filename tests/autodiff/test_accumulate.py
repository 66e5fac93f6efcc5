"""Accumulated gradients are products and sums in one, and the numbers stay."""

import pytest
import torch

from shardwright.autodiff.differentiate import Differentiator, add_into
from shardwright.ir import Builder, IRGraph, IRValue
from tests.building.derivatives import distance, run


def operators(graph: IRGraph) -> list[str]:
    return [node.op.split(".")[1] for node in graph.nodes]


def inputs(builder: Builder, *shapes: tuple[int, ...]) -> list[IRValue]:
    return [builder.input(f"x{i}", shape, "f64") for i, shape in enumerate(shapes)]


def tensors(graph: IRGraph) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [graph.values[value_id].shape for value_id in graph.inputs]
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def live(graph: IRGraph, value: IRValue) -> list[str]:
    """The operators that a value depends on."""
    needed, found = {value.id}, []
    for node in reversed(graph.nodes):
        if not needed.isdisjoint(node.outputs):
            needed.update(node.inputs)
            found.append(node.op.split(".")[1])
    return found[::-1]


def test_product_and_sum_are_one():
    builder = Builder()
    total, a, b = inputs(builder, (3, 5), (3, 4), (4, 5))
    total = add_into(builder, total, builder.call("aten.mm.default", a, b))
    assert live(builder.graph, total) == ["addmm"]
    graph = builder.finish(total)
    acc, x, y = tensors(graph)
    assert distance(run(graph, [acc, x, y])[0], acc + x @ y) < 1e-15


def test_several_products_are_added_one_into_the_next():
    builder = Builder()
    total, a, b = inputs(builder, (3, 5), (3, 4), (4, 5))
    for _ in range(2):
        total = add_into(builder, total, builder.call("aten.mm.default", a, b))
    assert live(builder.graph, total) == ["addmm", "addmm"]
    graph = builder.finish(total)
    acc, x, y = tensors(graph)
    assert distance(run(graph, [acc, x, y])[0], acc + 2 * (x @ y)) < 1e-15


def test_the_gradient_stays_what_it_was():
    """It may be that of another value as well, and be read only later."""
    builder = Builder()
    total, a, b = inputs(builder, (3, 5), (3, 4), (4, 5))
    product = builder.call("aten.mm.default", a, b)
    total = add_into(builder, total, product)
    graph = builder.finish([total, builder.call("aten.neg.default", product)])
    acc, x, y = tensors(graph)
    added, negated = run(graph, [acc, x, y])
    assert distance(added, acc + x @ y) < 1e-15
    assert torch.equal(negated, -(x @ y))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("transpose", ["aten.t.default", "aten.numpy_T.default"])
def test_a_transposed_product_is_that_of_the_transposed_factors(first: bool, transpose: str):
    builder = Builder()
    total, a, b = inputs(builder, (5, 3), *([(4, 3), (4, 5)] if first else [(3, 4), (5, 4)]))
    factors = (
        [builder.call("aten.t.default", a), b] if first else [a, builder.call("aten.t.default", b)]
    )
    product = builder.call("aten.mm.default", *factors)
    total = add_into(builder, total, builder.call(transpose, product))
    assert live(builder.graph, total) == ["t", "addmm"]
    graph = builder.finish(total)
    acc, x, y = tensors(graph)
    expected = acc + (x.t() @ y if first else x @ y.t()).t()
    assert distance(run(graph, [acc, x, y])[0], expected) < 1e-15


def test_a_product_transposed_twice():
    builder = Builder()
    total, a, b = inputs(builder, (3, 5), (3, 4), (4, 5))
    turned = builder.call("aten.t.default", builder.call("aten.mm.default", a, b))
    total = add_into(builder, total, builder.call("aten.transpose.int", turned, 1, 0))
    assert live(builder.graph, total) == ["addmm"]
    graph = builder.finish(total)
    acc, x, y = tensors(graph)
    assert distance(run(graph, [acc, x, y])[0], acc + x @ y) < 1e-15


def test_what_is_read_elsewhere_stays():
    builder = Builder()
    total, a, b = inputs(builder, (3, 5), (3, 4), (4, 5))
    product = builder.call("aten.mm.default", a, b)
    read = builder.call("aten.relu.default", product)
    total = add_into(builder, total, product)
    assert operators(builder.graph) == ["mm", "relu", "add"]
    builder.finish([total, read])


def test_sums_keep_the_dtype_of_the_accumulator():
    builder = Builder()
    a, b = builder.input("a", (3, 4), "bf16"), builder.input("b", (4, 5), "bf16")
    product = builder.call("aten.mm.default", a, b)
    wide = add_into(builder, builder.input("wide", (3, 5), "f32"), product)
    narrow = add_into(builder, builder.input("narrow", (3, 5), "bf16"), wide)
    assert (wide.dtype, narrow.dtype) == ("f32", "bf16")
    assert operators(builder.graph) == ["mm", "add", "add", "to"]


def test_a_linear_layers_weight_gradient_is_one_addmm():
    builder = Builder()
    x, weight = inputs(builder, (2, 3, 4), (5, 4))
    y = builder.call("aten.linear.default", x, weight)
    nodes = list(builder.graph.nodes)
    seed = builder.input("seed", y.shape, "f64")
    gradient = Differentiator(builder).backward(nodes, {y.id: seed}, [weight.id])[weight.id]
    total = add_into(builder, builder.input("total", (5, 4), "f64"), gradient)
    assert live(builder.graph, total) == ["reshape", "reshape", "t", "addmm"]
    graph = builder.finish(total)
    given = tensors(graph)
    expected = given[3] + torch.einsum("bto,bti->oi", given[2], given[0])
    assert distance(run(graph, given)[0], expected) < 1e-14
