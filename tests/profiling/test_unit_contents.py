"""Tensors for units that are run alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwright.ir import Builder, IRGraph, IRValue, compile_graph
from shardwright.ir.tensor_meta import DTYPES, torch_dtype
from shardwright.profiling.contents import contents, index_bounds
from tests.graphs import language_model

ROWS, CLASSES = 11, 5
LABELS = ("aten.cross_entropy_loss.default", None, 1, -100, 0.0)


def by_name(graph: IRGraph) -> dict[str, Tensor]:
    arguments = compile_graph(graph).arguments
    names = [graph.values[value_id].name for value_id in arguments]
    return dict(zip(names, contents(graph, arguments, "cpu"), strict=True))


def meta(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def lookups() -> dict[str, IRGraph]:
    """Graphs of one operator that looks something up, by what they are about."""
    found: dict[str, IRGraph] = {}

    def add(name: str, op: str, *attrs: object, table: tuple[int, ...] = (ROWS, 3)) -> None:
        builder = Builder(name)
        values = builder.input("values", table, "f32")
        shape = (4,) if len(table) == 1 or "select" in op else (4, *table[1:])
        index = builder.input("index", shape, "i64")
        found[name] = builder.finish(builder.call(op, values, *[
            index if attr == "index" else attr for attr in attrs
        ]))  # fmt: skip

    add("embedding", "aten.embedding.default", "index", table=(ROWS, 3))
    add("gather", "aten.gather.default", 0, "index")
    add("gather from behind", "aten.gather.default", -2, "index")
    add("index_select", "aten.index_select.default", 0, "index")
    add("take", "aten.take.default", "index", table=(ROWS,))
    add("take along all", "aten.take_along_dim.default", "index", None, table=(ROWS,))
    return found


@pytest.mark.parametrize("name", lookups())
def test_indices_are_within_what_they_look_up(name: str) -> None:
    graph = lookups()[name]
    assert index_bounds(graph) == {graph.inputs[1]: ROWS}
    index = by_name(graph)["index"]
    assert index.min() >= 0
    assert index.max() < ROWS
    compile_graph(graph)(contents(graph, graph.inputs, "cpu"))


def test_lists_of_indices_are_bound_by_the_dimension_that_each_is_for() -> None:
    builder = Builder("advanced")
    x = builder.input("x", (2, 3, 4), "f32")
    i = builder.input("i", (5,), "i64")
    graph = builder.finish(builder.call("aten.index.Tensor", x, [None, i]))
    assert index_bounds(graph) == {i.id: 3}


def test_labels_are_classes() -> None:
    builder = Builder("loss")
    scores = builder.input("scores", (7, CLASSES), "f32")
    labels = builder.input("labels", (7,), "i64")
    op, *attrs = LABELS
    graph = builder.finish(builder.call(op, scores, labels, *attrs))
    assert index_bounds(graph) == {labels.id: CLASSES}


def test_indices_of_backwards_are_bound_too() -> None:
    builder = Builder("backward")
    labels = builder.input("labels", (7,), "i64")
    scores, grad = builder.input("scores", (7, CLASSES), "f32"), builder.input("grad", (), "f32")
    total = builder.input("total", (), "f32")
    op = "aten.nll_loss_backward.default"
    given = builder.call(op, grad, scores, labels, None, 1, -100, total)
    table = builder.call("aten.embedding_dense_backward.default", scores, labels, ROWS, -1, False)
    assert index_bounds(builder.finish(given)) == {labels.id: CLASSES}
    assert index_bounds(builder.finish(table))[labels.id] == CLASSES


def test_a_bound_goes_through_views_and_casts_and_the_least_one_counts() -> None:
    builder = Builder("shared")
    tokens = builder.input("tokens", (2, 3), "i32")
    flat = builder.call("aten.view.default", tokens, [6])
    cast = builder.call("aten.to.dtype", flat, torch.int64)
    large = builder.param("large", meta(ROWS, 2))
    small = builder.param("small", meta(ROWS - 4, 2))
    x = builder.call("aten.embedding.default", large, cast)
    y = builder.call("aten.embedding.default", small, cast)
    graph = builder.finish(builder.call("aten.add.Tensor", x, y))
    assert index_bounds(graph)[tokens.id] == ROWS - 4


def values() -> dict[str, IRValue]:
    """Values of all sorts, none of which looks anything up."""
    graph = IRGraph("values")
    return {
        "half": graph.new_value("half", (3, 4), "bf16"),
        "eighth": graph.new_value("eighth", (3, 4), "f8"),
        "complex": graph.new_value("complex", (3,), "c64"),
        "count": graph.new_value("count", (3,), "i16"),
        "mask": graph.new_value("mask", (2, 2), "bool"),
        "turned": graph.new_value("turned", (3, 4), "f32", strides=(1, 3)),
        "expanded": graph.new_value("expanded", (3, 4), "f32", strides=(0, 1)),
        "gaps": graph.new_value("gaps", (3, 4), "f64", strides=(9, 2)),
        "scalar": graph.new_value("scalar", (), "f32"),
        "empty": graph.new_value("empty", (0, 4), "f32"),
    }


@pytest.mark.parametrize("name", values())
def test_tensors_have_the_shape_dtype_and_strides_of_the_model(name: str) -> None:
    value = values()[name]
    graph = IRGraph("one", {value.id: value})
    (tensor,) = contents(graph, [value.id], "cpu")
    assert tuple(tensor.shape) == value.shape
    assert tensor.dtype == getattr(torch, {
        "bf16": "bfloat16", "f8": "float8_e4m3fn", "c64": "complex64", "i16": "int16",
        "bool": "bool", "f32": "float32", "f64": "float64",
    }[value.dtype])  # fmt: skip
    if value.strides is not None:
        assert tensor.stride() == value.strides
    if name in ("count", "mask"):
        assert tensor.eq(1).all()


def test_stored_values_have_the_models_contents_but_not_its_memory() -> None:
    graph = language_model()
    found = by_name(graph)
    for value in graph.stored():
        own = graph.tensors[value.id]
        assert torch.equal(found[value.name], own)
        assert found[value.name].data_ptr() != own.data_ptr()


def test_without_contents_they_are_drawn_and_no_generator_is_touched() -> None:
    builder = Builder("empty")
    weight = builder.param("weight", meta(4, 16))
    x = builder.input("x", (2, 16), "f32")
    graph = builder.finish(builder.call("aten.linear.default", x, weight))
    before = torch.get_rng_state()
    first, second = by_name(graph), by_name(graph)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["weight"].abs().max() <= 1 / 8
    assert first["x"].min() >= 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=4),
    st.sampled_from(sorted(DTYPES)),
    st.booleans(),
)
def test_any_layout_of_any_dtype(
    sizes_and_strides: list[tuple[int, int]], dtype: str, stored: bool
) -> None:
    shape = tuple(size for size, _ in sizes_and_strides)
    strides = tuple(step for _, step in sizes_and_strides)
    graph = IRGraph("one")
    value = graph.new_value("x", shape, dtype, strides=strides, role="param" if stored else "input")
    (tensor,) = contents(graph, [value.id], "cpu")
    assert tuple(tensor.shape) == shape
    assert tensor.dtype == torch_dtype(dtype)
    assert value.strides is None or tensor.stride() == strides
    assert tensor.to(torch.complex128).abs().isfinite().all()
