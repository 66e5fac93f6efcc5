"""Graphs as text: round trips, equal layers, and every way in which a text can be wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import GraphError
from shardwright.ir import Builder, IRGraph, compile_graph
from shardwright.ir.tensor_meta import DTYPES, torch_dtype
from shardwright.pipeline import TensorInfo
from shardwright.pipeline.fxtext import decode, encode, parse


def infos(graph: IRGraph) -> list[TensorInfo]:
    values = [graph.values[value_id] for value_id in graph.inputs]
    return [TensorInfo(v.shape, v.dtype, strides=v.strides) for v in values]  # type: ignore[arg-type]


def round_trip(graph: IRGraph) -> IRGraph:
    text = encode(graph)
    again = decode(text, infos(graph))
    assert encode(again) == text
    assert [node.op for node in again.nodes] == [node.op for node in graph.nodes]
    assert [node.attrs for node in again.nodes] == [node.attrs for node in graph.nodes]
    return again


def layer(name: str) -> IRGraph:
    builder = Builder(name)
    x = builder.input(f"{name}_x", (2, 3, 8))
    weight = builder.input(f"{name}_w", (8, 8))
    with builder.scope(f"layers.{name}", "Layer"):
        h = builder.call("aten.linear.default", x, weight)
        h = builder.call("aten.transpose.int", h, 0, 1)
        parts = builder.call("aten.split.Tensor", h, 4, -1)
        h = builder.call("aten.cat.default", [parts[1], parts[0]], -1)
    return builder.finish([h, x, parts[1], h])


def test_the_text() -> None:
    builder = Builder()
    x, weight = builder.input("x", (4, 8)), builder.input("w", (2, 8))
    made = builder.call("aten.linear.default", x, weight)
    assert json.loads(encode(builder.finish([made]))) == {
        "version": 1,
        "inputs": ["i0", "i1"],
        "nodes": [
            {
                "name": "n0",
                "op": "aten.linear.default",
                "args": [{"ref": "i0"}, {"ref": "i1"}, None],
                "kwargs": {},
                "outputs": [{"shape": [4, 2], "dtype": "f32"}],
            }
        ],
        "outputs": [{"ref": "n0"}],
    }


def test_equal_layers_have_equal_text() -> None:
    assert encode(layer("0")) == encode(layer("1"))


def test_the_same_numbers_come_out() -> None:
    graph = layer("0")
    again = round_trip(graph)
    x, weight = torch.randn(2, 3, 8), torch.randn(8, 8)
    for a, b in zip(
        compile_graph(graph)([x, weight]), compile_graph(again)([x, weight]), strict=True
    ):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


def test_strides_and_elements_of_several_outputs() -> None:
    text = json.loads(encode(layer("0")))
    assert text["nodes"][1]["outputs"] == [
        {"shape": [3, 2, 8], "dtype": "f32", "strides": [8, 24, 1]}
    ]
    assert text["nodes"][3]["args"][0] == [{"ref": "n2", "index": 1}, {"ref": "n2", "index": 0}]
    assert text["outputs"] == [
        {"ref": "n3"},
        {"ref": "i0"},
        {"ref": "n2", "index": 1},
        {"ref": "n3"},
    ]


def call(op: str, *args: Any, shape: tuple[int, ...] = (2, 3), **kwargs: Any) -> IRGraph:
    builder = Builder()
    x = builder.input("x", shape)
    arguments = [x if item is ... else item for item in args]
    made = builder.call(op, *arguments, **kwargs)
    return builder.finish(made if isinstance(made, list) else [made])


@pytest.mark.parametrize(
    "make",
    [
        lambda: call("aten.full.default", [2], math.inf, dtype=torch.float16),
        lambda: call("aten.clamp.default", ..., -math.inf, math.nan),
        lambda: call("aten.to.dtype", ..., torch.bfloat16, memory_format=torch.contiguous_format),
        lambda: call("aten.zeros.default", [2, 0], layout=torch.strided, pin_memory=False),
        lambda: call("aten.arange.start_step", 0, 10, 3, dtype=torch.int64),
        lambda: call("aten.add.Tensor", ..., ..., alpha=2**60),
        lambda: call("aten.div.Tensor_mode", ..., 3.0, rounding_mode="floor"),
        lambda: call("aten.unbind.int", ..., shape=(1, 3)),
        lambda: call("aten.max.dim", ..., 1),
        lambda: call("aten.sum.dim_IntList", ..., [], True),
    ],
)
def test_attributes_come_back(make: Callable[[], IRGraph]) -> None:
    round_trip(make())


def test_lists_of_tensors_and_none() -> None:
    builder = Builder()
    x, index = builder.input("x", (4, 8)), builder.input("i", (3,), "i64")
    picked = builder.call("aten.index.Tensor", x, [None, index])
    again = round_trip(builder.finish([picked]))
    x_, i_ = torch.randn(4, 8), torch.tensor([1, 7, 0])
    assert torch.equal(compile_graph(again)([x_, i_])[0], x_[:, i_])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: str) -> None:
    round_trip(call("aten.to.dtype", ..., torch_dtype(dtype)))


def test_inputs_keep_their_strides() -> None:
    builder = Builder()
    x = builder.input("x", (2, 3), strides=(1, 2))
    again = round_trip(builder.finish([builder.call("aten.relu.default", x)]))
    assert again.values[again.inputs[0]].strides == (1, 2)


OPERATORS = ("aten.relu.default", "aten.add.Tensor", "aten.chunk.default", "aten.stack.default")


@st.composite
def graphs(draw: st.DrawFn) -> IRGraph:
    """Graphs of a few nodes that use, repeat and return anything made before."""
    builder = Builder()
    values = [builder.input(f"x{i}", (4, 2)) for i in range(draw(st.integers(1, 3)))]
    for op in draw(st.lists(st.sampled_from(OPERATORS), max_size=6)):
        first, second = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        if op == "aten.relu.default":
            values.append(builder.call(op, first))
        elif op == "aten.add.Tensor":
            values.append(builder.call(op, first, second, alpha=draw(st.floats(-1e30, 1e30))))
        elif op == "aten.chunk.default":
            halves = builder.call(op, builder.call("aten.cat.default", [first, second], 0), 2, 0)
            values.extend(halves)
        else:
            both = builder.call(op, [first, second], 0)
            values.append(builder.call("aten.select.int", both, 0, draw(st.integers(0, 1))))
    return builder.finish(draw(st.lists(st.sampled_from(values), max_size=3)))


@given(graphs())
def test_any_graph_comes_back(graph: IRGraph) -> None:
    again = decode(encode(graph), infos(graph))
    assert encode(again) == encode(graph)
    inputs = [torch.randn(4, 2) for _ in graph.inputs]
    for a, b in zip(compile_graph(graph)(inputs), compile_graph(again)(inputs), strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


# --- what is refused ---------------------------------------------------------------------------


def test_a_graph_with_stored_values_is_refused() -> None:
    builder = Builder()
    weight = builder.param("weight", torch.ones(2))
    graph = builder.finish([builder.call("aten.relu.default", weight)])
    with pytest.raises(GraphError, match="a supertask's constants are inputs"):
        encode(graph)


def edited(change: Callable[[Any], object]) -> str:
    data = json.loads(encode(layer("0")))
    change(data)
    return json.dumps(data)


def node(index: int, **fields: Any) -> Callable[[Any], object]:
    return lambda data: data["nodes"][index].update(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(version=2), "version"),
        (lambda d: d.pop("inputs"), "inputs"),
        (lambda d: d.update(extra=1), "extra"),
        (lambda d: d["nodes"][0].update(code="x"), "code"),
        (node(0, name="i0"), "'i0' stands twice"),
        (node(1, name="n0"), "'n0' stands twice"),
        (node(0, args=[{"ref": "n1"}, {"ref": "i1"}]), "'n1' is to no input"),
        (node(1, args=[{"ref": "n0", "index": 0}, 0, 1]), "'n0' with index 0"),
        (node(3, args=[[{"ref": "n2", "index": 2}], 0]), "'n2' with index 2"),
        (node(3, args=[[{"ref": "n2"}], 0]), "'n2' is to no input"),
        (node(0, args=[{"ref": 3}]), "no reference"),
        (node(0, args=[{"ref": "i0", "at": 3}]), "no reference"),
        (node(0, args=[{"ref": "i0", "index": -1}]), "no reference"),
        (lambda d: d.update(outputs=[{"ref": "n9"}]), "the outputs: the reference to 'n9'"),
        (node(0, outputs=[{"shape": [1], "dtype": "f99"}]), "unknown dtype 'f99'"),
        (node(0, outputs=[{"shape": [-1], "dtype": "f32"}]), ">= 0"),
        (node(0, outputs=[{"shape": [1], "dtype": "f32", "strides": []}]), "0 strides for 1"),
        (
            lambda d: (node(3, outputs=[])(d), d.update(outputs=[])),
            "returns 1 tensors, the text says 0",
        ),
        (node(0, op="aten.nothing.default"), "does not exist"),
        (node(0, op="os.system.default"), "not allowed"),
        (node(0, op="aten.linear"), "does not exist"),
        (node(0, op="Backward"), "Backward"),
        (node(0, op="aten.relu_.default", args=[{"ref": "i0"}]), "writes to its input"),
        (node(0, op="aten.from_file.default", args=["/dev/null"]), "open files"),
        (node(0, kwargs={"nothing": 1}), "every argument of the operator's schema"),
        (node(0, args=[{"input": 0}, {"ref": "i1"}]), "write a reference"),
        (node(0, args=[{"dtype": "f99"}, {"ref": "i1"}]), "f99"),
        (node(0, args=[{"call": "eval"}, {"ref": "i1"}]), "unknown tagged value"),
        (node(0, args=[{"device": "cuda:0"}, {"ref": "i1"}]), "device"),
    ],
)
def test_a_wrong_text(change: Callable[[Any], object], message: str) -> None:
    text = edited(change)
    with pytest.raises(GraphError) as caught:
        decode(text, infos(layer("0")))
    assert message in str(caught.value)


def test_another_number_of_tensors() -> None:
    with pytest.raises(GraphError, match="takes 2 tensors, given are 1"):
        decode(encode(layer("0")), [TensorInfo((1,), "f32")])


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\ud800", "[" * 5000, '{"version":NaN}'])
def test_garbage(text: str) -> None:
    with pytest.raises(GraphError, match="not the text of a graph"):
        parse(text)


@given(st.integers(0, 2000))
def test_a_text_cut_short(length: int) -> None:
    text = encode(layer("0"))
    with pytest.raises(GraphError):
        parse(text[: min(length, len(text) - 1)])
