"""Lowering is serialization: it decides nothing and refuses what is not filled in."""

from dataclasses import replace

import pytest
import torch

from shardwright.compiler.lowering import lower_graph
from shardwright.errors import ExecError
from shardwright.ir import Builder
from shardwright.kernels.emitters import emit_graph
from shardwright.kernels.lowered import BY_NAME
from shardwright.kernels.row import ABSENT


def small():
    builder = Builder("small")
    x, w = builder.input("x", (2, 3)), builder.param("w", torch.zeros(4, 3))
    y = builder.call("aten.linear.default", x, w)
    turned = builder.call("aten.t.default", y)
    return builder.finish(builder.call("aten.reshape.default", turned, [8]))


def test_calls_values_and_ends_are_those_of_the_graph():
    graph = small()
    lowered = lower_graph(emit_graph(graph))
    assert str(lowered).splitlines() == [
        "lowered small: 4 calls",
        "  0 gemm(%x, %w, -, -) -> %linear  transpose_b=1",
        "  1 view(%linear) -> %t  offset=0  shape=(4, 2)  strides=(1, 4)",
        "  2 copy(%t) -> %reshape.8",
        "  3 view(%reshape.8) -> %reshape  offset=0  shape=(8,)  strides=(1,)",
    ]
    assert lowered.inputs == tuple(graph.inputs)
    assert lowered.outputs == tuple(graph.outputs)
    assert lowered.ops[0].in_vids[2:] == (ABSENT, ABSENT)
    assert "aten.linear.default" in lowered.ops[0].where
    (w,) = graph.stored()
    assert lowered.values[w.id].names == ("w",)
    assert lowered.values[w.id].role == "param"


def test_a_call_alone_prints_with_numbers():
    lowered = lower_graph(emit_graph(small()))
    calls = [str(op) for op in lowered.ops[:2]]
    x, w, y, turned = (*lowered.ops[0].in_vids[:2], *lowered.ops[0].out_vids, lowered.ops[1])
    assert calls[0] == f"gemm(%{x}, %{w}, -, -) -> %{y}  transpose_b=1"
    assert calls[1].startswith(f"view(%{y}) -> %{turned.out_vids[0]}  offset=0")
    unknown = replace(lowered.ops[0], kind_id=250, attr_blob=b"\1\2")
    assert str(unknown) == f"kind 250(%{x}, %{w}, -, -) -> %{y}  schema=1 blob=0102"


def test_what_was_not_emitted_is_refused():
    with pytest.raises(ExecError, match=r"aten.linear.default was not emitted; call emit_graph"):
        lower_graph(small())


@pytest.mark.parametrize("name", ["kind_id", "attr_schema", "attr_blob"])
def test_a_field_that_is_left_empty_is_refused(name):
    graph = emit_graph(small())
    node = graph.nodes[0]
    node.emitted = (replace(node.emitted[0], **{name: None}),)
    with pytest.raises(ExecError, match=f"the emitter left {name} empty"):
        lower_graph(graph)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"attr_schema": 9}, "no attribute schema 9"),
        ({"attr_blob": b"\0"}, "gemm, schema 1"),
        ({"kind_id": 999}, "kind 999 is unknown"),
        ({"attr_schema": 0}, "schema 0 has no blob"),
    ],
)
def test_attributes_that_the_schema_cannot_read_are_refused(change, said):
    graph = emit_graph(small())
    node = graph.nodes[0]
    node.emitted = (replace(node.emitted[0], **change),)
    with pytest.raises(ExecError, match=said):
        lower_graph(graph)


def test_defaults_are_schema_0():
    builder = Builder()
    x = builder.input("x", (3, 3))
    graph = emit_graph(builder.finish(builder.call("aten.mm.default", x, x)))
    (op,) = lower_graph(graph).ops
    assert (op.kind_id, op.attr_schema, op.attr_blob) == (BY_NAME["gemm"].id, 0, b"")
