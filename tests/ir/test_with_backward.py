"""The text of a backward, which an attribute holds, as a graph."""

import pytest
import torch

from shardwright.errors import GraphError
from shardwright.ir import SLOT, Builder, IRGraph
from shardwright.ir.with_backward import backward_graph, identity_backward

WRITTEN_BY_VERSION_1 = """\
graph backward
input %g: f32[4, 8]
input %s: f32[8, 8]
  %v: f32[8, 8]{1, 8} = aten.t.default(%s)
  %v__1: bf16[8, 8]{1, 8} = aten.to.dtype(%v, dtype=torch.bfloat16, non_blocking=False, \
copy=False, memory_format=None)
  %v__2: bf16[4, 8] = aten.mm.default(%g, %v__1)
  %v__3: f32[1, 8] = aten.sum.dim_IntList(%v__2, dim=[0], keepdim=True, dtype=None)
  %v__4!: f32[4, 8] = aten.mul.Tensor(%g, other=-1e-06)
return %v__4, %v__3, %g
""".replace("%v__3:", "%v__3!:")


def text_of(graph: IRGraph) -> str:
    graph.in_structure = graph.out_structure = None
    return str(graph)


def test_a_text_of_version_1_reads() -> None:
    graph = backward_graph(WRITTEN_BY_VERSION_1)
    assert str(graph) == WRITTEN_BY_VERSION_1
    assert [node.op for node in graph.nodes][:2] == ["aten.t.default", "aten.to.dtype"]
    assert graph.nodes[1].attrs["dtype"] is torch.bfloat16
    assert graph.nodes[4].attrs == {"other": -1e-06}
    assert graph.values[graph.nodes[0].outputs[0]].strides == (1, 8)


def test_a_backward_that_gives_what_it_is_given() -> None:
    builder = Builder("any")
    graph = backward_graph(identity_backward(builder.input("x", (2, 3), strides=(1, 2))))
    assert (graph.inputs, graph.nodes) == (graph.outputs, [])


def test_a_backward_that_gives_nothing() -> None:
    assert backward_graph("graph backward\ninput %g: f32[]\nreturn\n").outputs == []


@pytest.mark.parametrize("number", [1e-05, 1e22, 5e-324, 0.1, -3, True, complex(1, -2.5)])
def test_numbers_read_back_exactly(number: complex) -> None:
    builder = Builder("backward")
    x = builder.input("g", (2,), "c64")
    text = text_of(builder.finish([builder.call("aten.mul.Scalar", x, number)]))
    assert backward_graph(text).nodes[0].attrs == {"other": number}


def test_every_kind_of_attribute_reads_back() -> None:
    builder = Builder("backward")
    x = builder.input("g", (2, 2, 2, 2))
    i = builder.input("s", (2,), "i64")
    y = builder.call("aten.index_put.default", x, [None, i], x, True)
    y = builder.call("aten.clamp.default", y, float("-inf"), float("inf"))
    y = builder.call("aten.nan_to_num.default", y, nan=float("nan"))
    y = builder.call("aten.div.Tensor_mode", y, y, rounding_mode="floor")
    y = builder.call("aten.clone.default", y, memory_format=torch.channels_last)
    z = builder.call("aten.zeros.default", [2], dtype=torch.bool, device="cpu")
    w = builder.input("s", (2, 2, 1))
    g = builder.input("g", (1, 2, 4))
    mask = [False, True, False]
    like = ([1], [0], [1], False, [0], 1)
    _, dw, _ = builder.call("aten.convolution_backward.default", g, g, w, None, *like, mask)
    text = text_of(builder.finish([y, z, dw]))
    graph = backward_graph(text)
    assert str(graph) == text
    assert graph.nodes[5].attrs["device"] is SLOT
    assert graph.nodes[-1].absent == (0, 2)
    mode = '%x", = %y'
    kept = text.replace('"floor"', f'"{mode}"'.replace('x"', 'x\\"'))
    assert backward_graph(kept).nodes[3].attrs == {"rounding_mode": mode}


@pytest.mark.parametrize(
    "line",
    [
        "input %x f32[2]",
        "input %x: f32[a]",
        "%y: f32[2] = aten.relu.default(%x)",
        "%y: f32[2] = aten.relu.default(3)",
        "%y: f32[2] = aten.relu.default(%g",
        "%y: f32[2] = aten.relu.default(%g) + f()",
        "%y: f32[2] = aten.mul.Scalar(%g, other=print)",
        "%y: f32[2] = aten.mul.Scalar(%g, other=1 + 1)",
        "%y: f32[2] = aten.mul.Scalar(%g, other=float(1, 1))",
        "%y: f32[2 = aten.relu.default(%g)",
        "param %w: f32[2]",
        "return %x",
        "%g",
        "something else",
    ],
)
def test_any_other_line_is_named(line: str) -> None:
    with pytest.raises(GraphError, match="text of a backward cannot be read at '") as error:
        backward_graph(f"graph backward\ninput %g: f32[2]\n{line}")
    assert line in str(error.value)


def test_what_no_graph_may_hold_is_refused() -> None:
    text = "graph backward\ninput %g: f32[2]\n  %v!: f32[2] = os.system(%g)\nreturn %v"
    with pytest.raises(GraphError, match=r"operator 'os\.system'"):
        backward_graph(text)
