import pytest
import torch

from shardwright.costs.roofline import moves_nothing
from shardwright.ir import Builder
from tests.steps import language_step

X = (4, 6)


def moves(op, *args, turned=False, shape=X, dtype="f32", **kwargs):
    """Whether a call moves memory; its first argument may lie turned."""
    builder = Builder("call")
    x = builder.input("x", shape, dtype)
    if turned:
        x = builder.call("aten.transpose.int", x, 0, 1)
    builder.call(f"aten.{op}", x, *args, **kwargs)
    return not moves_nothing(builder.graph, builder.graph.nodes[-1])


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("view.default", ([24],)),
        ("transpose.int", (0, 1)),
        ("select.int", (0, 1)),
        ("split.Tensor", (2,)),
        ("numpy_T.default", ()),
        ("movedim.int", (0, 1)),
        ("narrow.default", (0, 1, 2)),
        ("diagonal.default", ()),
        ("reshape.default", ([24],)),
        ("flatten.using_ints", ()),
        ("contiguous.default", ()),
        ("to.dtype", (torch.float32,)),
        ("dropout.default", (0.5, False)),
        ("dropout.default", (0.0, True)),
        ("alias.default", ()),
    ],
)
def test_what_returns_what_it_is_given(op, args):
    assert not moves(op, *args)


@pytest.mark.parametrize(
    ("op", "args", "turned"),
    [
        ("reshape.default", ([24],), True),
        ("flatten.using_ints", (), True),
        ("contiguous.default", (), True),
        ("clone.default", (), False),
        ("to.dtype", (torch.float64,), False),
        ("dropout.default", (0.5, True), False),
        ("relu.default", (), False),
        ("repeat.default", ([2, 1],), False),
    ],
)
def test_what_makes_new_memory(op, args, turned):
    assert moves(op, *args, turned=turned)


def test_a_turned_tensor_may_still_be_seen_in_another_shape():
    assert not moves("reshape.default", [6, 2, 2], turned=True)


def test_markers_and_calls_without_inputs_are_no_views():
    graph = language_step()
    assert not any(moves_nothing(graph, node) for node in graph.nodes if "." not in node.op)
    builder = Builder("arange")
    builder.call("aten.arange.default", 5)
    assert not moves_nothing(builder.graph, builder.graph.nodes[0])
