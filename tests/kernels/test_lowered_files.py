"""Lowered graphs as text: there and back, and refused where they are not valid."""

import base64
import json

import pytest
import torch
from hypothesis import given, settings

from shardwright.compiler.executor import Executor
from shardwright.compiler.lowering import lower_graph
from shardwright.compiler.memory.plan import make_exec_plan
from shardwright.errors import ExecError
from shardwright.ir import Builder, IRGraph
from shardwright.kernels.emitters import emit_graph
from shardwright.kernels.files import decode, encode
from shardwright.kernels.lowered import BY_NAME
from tests.compiler.running import assert_close, contents
from tests.ir.random_graphs import RandomGraph, random_graphs


def with_stored_inputs(graph: IRGraph) -> IRGraph:
    """The graph with its stored values as inputs behind the others."""
    builder = Builder(graph.name)
    mapping = {}
    for value_id in graph.inputs:
        mapping[value_id] = builder.copy_value(graph, graph.values[value_id]).id
    for value in graph.stored():
        mapping[value.id] = builder.copy_value(graph, value, role="input").id
    for node in graph.nodes:
        builder.copy_node(graph, node, mapping)
    return builder.finish([mapping[value_id] for value_id in graph.outputs])


@settings(deadline=None, max_examples=40)
@given(random_graphs())
def test_a_text_says_the_whole_graph(drawn: RandomGraph):
    graph = with_stored_inputs(drawn.graph)
    text = encode(lower_graph(emit_graph(graph)))
    read = decode(text)
    assert encode(read) == text
    assert decode(encode(read)) == read
    executor = Executor(make_exec_plan(read))
    inputs = [*drawn.inputs, *contents(drawn.graph).values()]
    feed = {read.values[vid].name: t for vid, t in zip(read.inputs, inputs, strict=True)}
    # Gradients of norms may cancel to a hundred-thousandth of what they are summed of.
    for found, wanted in zip(executor.run(feed), drawn.outputs, strict=True):
        assert_close(found, wanted.contiguous(), 1e-9)


def lowered():
    builder = Builder("small")
    x, w = builder.input("x", (4, 8)), builder.input("w", (16, 8))
    y = builder.call("aten.linear.default", x, w)
    turned = builder.call("aten.t.default", builder.call("aten.relu.default", y))
    return lower_graph(emit_graph(builder.finish([turned])))


def test_the_text_of_a_small_graph():
    assert json.loads(encode(lowered())) == {
        "version": 1,
        "inputs": 2,
        "values": [
            {"shape": [4, 8], "dtype": "f32"},
            {"shape": [16, 8], "dtype": "f32"},
            {"shape": [4, 16], "dtype": "f32"},
            {"shape": [4, 16], "dtype": "f32"},
            {"shape": [16, 4], "dtype": "f32", "strides": [1, 16]},
        ],
        "calls": [
            {
                "kind": 20,
                "schema": 1,
                "inputs": [0, 1, -1, -1],
                "outputs": [2],
                "blob": base64.b64encode(bytes([0, 1, 0, *[0] * 6, 0xF0, 0x3F])).decode(),
            },
            {"kind": 10, "schema": 0, "inputs": [2], "outputs": [3]},
            {
                "kind": 3,
                "schema": 1,
                "inputs": [3],
                "outputs": [4],
                "blob": base64.b64encode(
                    BY_NAME["view"].pack({"offset": 0, "shape": (16, 4), "strides": (1, 16)})[1]
                ).decode(),
            },
        ],
        "outputs": [4],
    }


def test_equal_layers_have_equal_texts():
    first, second = lowered(), lowered()
    assert encode(first) == encode(second)
    assert "small" not in encode(first)


def changed(change):
    text = json.loads(encode(lowered()))
    change(text)
    return json.dumps(text)


def blob(kind, **attrs):
    return base64.b64encode(BY_NAME[kind].attrs.pack(attrs)).decode()


GEMM = {"transpose_a": 0, "transpose_b": 1, "activation": 0, "alpha": 1.0}


def generic(op):
    return {"kind": 0, "schema": 1, "blob": blob("generic", op=op, call="")}


BROKEN = {
    "another version": (lambda t: t.update(version=2), "not the text"),
    "an unknown field": (lambda t: t.update(extra=1), "not the text"),
    "an unknown kind": (lambda t: t["calls"][1].update(kind=999), "call 1: kind 999 is unknown"),
    "an unknown schema": (lambda t: t["calls"][0].update(schema=7), "no attribute schema 7"),
    "a short blob": (lambda t: t["calls"][0].update(blob="AAE="), "call 0: gemm, schema 1"),
    "a blob of schema 0": (lambda t: t["calls"][1].update(blob="AAE="), "schema 0 has no blob"),
    "no base64": (lambda t: t["calls"][0].update(blob="é"), r"base64.*calls\[0\].blob"),
    "too few operands": (lambda t: t["calls"][0].update(inputs=[0, 1]), "gemm with 2 inputs"),
    "no bias and no matrix": (lambda t: t["calls"][0].update(inputs=[0, -1, -1, -1]), "needs b"),
    "a value read early": (lambda t: t["calls"][0].update(inputs=[0, 3, -1, -1]), "call 0 reads"),
    "a value made twice": (lambda t: t["calls"][1].update(outputs=[2]), "call 1 makes"),
    "an unknown output": (lambda t: t.update(outputs=[9]), "outputs are"),
    "a value nobody makes": (lambda t: t["values"].append(t["values"][0]), "only 5 are made"),
    "an unknown dtype": (lambda t: t["values"][2].update(dtype="f99"), "value 2 is f99"),
    "a negative size": (lambda t: t["values"][2].update(shape=[-4, 16]), "value 2"),
    "a negative stride": (lambda t: t["values"][4].update(strides=[-1, 16]), "value 4"),
    "more inputs than values": (lambda t: t.update(inputs=99), "99 inputs of 5 values"),
    "a view outside": (
        lambda t: t["calls"][2].update(blob=blob("view", offset=1, shape=(16, 4), strides=(1, 16))),
        "call 2: a view",
    ),
    "a view before the beginning": (
        lambda t: t["calls"][2].update(blob=blob("view", offset=-1, shape=(16, 4), strides=(1, 2))),
        "call 2: a view",
    ),
    "a view with a stride too few": (
        lambda t: t["calls"][2].update(blob=blob("view", offset=0, shape=(16, 4), strides=(1,))),
        "call 2: a view has as many strides as sizes",
    ),
    "a size that 64 bits do not hold": (
        lambda t: t["values"][0].update(shape=[2**63, 8]),
        "value 0 is f32.* below",
    ),
    "a size of nothing that 64 bits do not hold": (
        lambda t: t["values"][0].update(shape=[0, 2**64]),
        "value 0 is f32.* below",
    ),
    "more elements than 64 bits count": (
        lambda t: t["values"][0].update(shape=[2**32, 2**32], strides=[0, 0]),
        "value 0 is f32.* below",
    ),
    "more bytes than 64 bits count": (
        lambda t: t["values"][0].update(shape=[2**61]),
        "value 0 is f32.* below",
    ),
    "a stride that 64 bits do not hold": (
        lambda t: t["values"][4].update(strides=[1, 2**63]),
        "value 4 is f32.* below",
    ),
    "an activation that is none": (
        lambda t: t["calls"][0].update(blob=blob("gemm", **GEMM | {"activation": 200})),
        "call 0, gemm: activation=200; expected one of 0 none, 1 relu",
    ),
    "a flag that is none": (
        lambda t: t["calls"][0].update(blob=blob("gemm", **GEMM | {"transpose_b": 7})),
        "call 0, gemm: transpose_b=7; expected a number from 0 to 1",
    ),
    "a matrix the other way round": (
        lambda t: t["calls"][0].update(blob=blob("gemm", **GEMM | {"transpose_b": 0})),
        r"call 0, gemm: a is f32\[4, 8\] and b is f32\[16, 8\]; expected as many",
    ),
    "a shape that is not what the call makes": (
        lambda t: t["values"][2].update(shape=[2, 16]),
        r"call 0, gemm: y is f32\[2, 16\], but the call makes f32\[4, 16\]; lower",
    ),
    "a dtype that is not what the call makes": (
        lambda t: t["values"][3].update(dtype="f64"),
        r"call 1, relu: y is f64\[4, 16\], but the call makes f32\[4, 16\]; lower",
    ),
    "a view of another dtype": (
        lambda t: t["values"][4].update(dtype="i32"),
        r"call 2: a view .* of f32, as i32\[16, 4\], does not lie in value 3",
    ),
    "elements on one another": (
        lambda t: t["values"][2].update(strides=[0, 1]),
        r"call 0, gemm: y is f32\[4, 16\] with strides \[0, 1\].* lie on one another",
    ),
    "an operator that writes": (
        lambda t: t["calls"][1].update(generic("aten.relu_.default")),
        "aten.relu_.default writes",
    ),
    "an operator of another namespace": (
        lambda t: t["calls"][1].update(generic("prim.device.default")),
        "not allowed",
    ),
}


@pytest.mark.parametrize(("change", "said"), BROKEN.values(), ids=BROKEN)
def test_what_is_not_valid_is_refused(change, said):
    with pytest.raises(ExecError, match=said):
        decode(changed(change))


def test_what_is_no_json_is_refused():
    for text in ("", "{", "[]", "null", "\ud800", "[" * 100000):
        with pytest.raises(ExecError, match="not the text"):
            decode(text)


def test_stored_values_cannot_stand_in_a_text():
    builder = Builder("small")
    w = builder.param("w", torch.zeros(3))
    graph = lower_graph(emit_graph(builder.finish(builder.call("aten.relu.default", w))))
    with pytest.raises(ExecError, match="stores %w"):
        encode(graph)
