"""The work of calls, held against torch's own counter, and views that move nothing."""

import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shardwright.costs.roofline import arithmetic, element_operations, moves_nothing
from shardwright.ir import Builder, resolve
from shardwright.ops.catalog import ROWS
from shardwright.ops.register import register_op
from shardwright.tracing import capture
from tests.steps import language_step


def real(*shape):
    return torch.ones(shape)


IMAGE = real(2, 4, 6, 6)
HEADS = [real(2, 4, 5, 8), real(2, 4, 7, 8), real(2, 4, 7, 16)]
CALLS = [
    ("mm.default", real(3, 4), real(4, 5)),
    ("bmm.default", real(2, 3, 4), real(2, 4, 5)),
    ("addmm.default", real(5), real(3, 4), real(4, 5)),
    ("baddbmm.default", real(2, 3, 5), real(2, 3, 4), real(2, 4, 5)),
    ("linear.default", real(2, 3, 4), real(5, 4), real(5)),
    ("matmul.default", real(2, 3, 4), real(4, 5)),
    ("conv1d.default", real(2, 4, 9), real(6, 4, 3), real(6), [2], [1]),
    ("conv2d.default", IMAGE, real(6, 2, 3, 3), None, [2, 2], [1, 1], [1, 1], 2),
    ("conv_transpose2d.input", IMAGE, real(4, 3, 2, 2), None, [2, 2]),
    ("scaled_dot_product_attention.default", *HEADS),
]


def graph_of(name, *args):
    builder = Builder("call")
    values = [
        builder.input("x", arg.shape, "f32") if isinstance(arg, torch.Tensor) else arg
        for arg in args
    ]
    builder.call(f"aten.{name}", *values)
    return builder.graph, builder.graph.nodes[-1]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0])
def test_as_many_as_torch_counts(call):
    name, *args = call
    with FlopCounterMode(display=False) as counter:
        resolve(f"aten.{name}")(*args)
    assert arithmetic(*graph_of(*call)) == counter.get_total_flops()


@pytest.mark.parametrize("mask", [[True, True, False], [False, True, True], [True, False, False]])
def test_backwards_of_convolutions_count_the_gradients_they_give(mask):
    args = [real(2, 6, 6, 6), IMAGE, real(6, 4, 3, 3), [6], [1, 1], [1, 1], [1, 1]]
    args += [False, [0, 0], 1, mask]
    with FlopCounterMode(display=False) as counter:
        torch.ops.aten.convolution_backward.default(*args)
    graph, node = graph_of("convolution_backward.default", *args)
    assert arithmetic(graph, node) == counter.get_total_flops()


def test_a_backward_of_attention_counts_three_forwards():
    query, key, value = HEADS[0], HEADS[0].clone(), HEADS[0].clone()
    op = "_scaled_dot_product_flash_attention_for_cpu"
    forward = graph_of(f"{op}.default", query, key, value)
    backward = graph_of(
        f"{op}_backward.default", query, query, key, value, query, real(2, 4, 5), 0.0, False
    )
    assert arithmetic(*backward) == 3 * arithmetic(*forward)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bij,bjk->bik", [(2, 3, 4), (2, 4, 5)]),
        ("...ij,jk->...ik", [(2, 3, 4), (4, 5)]),
        ("i...j,jk->i...k", [(3, 2, 4), (4, 5)]),
    ],
)
def test_einsum_spans_all_indices(equation, shapes):
    builder = Builder("einsum")
    inputs = [builder.input(name, shape) for name, shape in zip("xy", shapes, strict=True)]
    builder.call("aten.einsum.default", equation, inputs)
    assert arithmetic(builder.graph, builder.graph.nodes[0]) == 2 * 2 * 3 * 4 * 5


@register_op("(h^ m^) kd+, kd+ n -> h^ m^ n", name="counted_product")
def product(x: torch.Tensor, y: torch.Tensor, h: int = 2) -> torch.Tensor:
    return (x @ y).unflatten(0, (h, -1))


@register_op("a b+ -> a", name="counted_sum")
def summed(x: torch.Tensor) -> torch.Tensor:
    return x.sum(1)


@register_op("m^ k+, e^ k+ n, e^ -> m^ n", name="counted_experts")
def experts(x: torch.Tensor, y: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return (x @ y.sum(0)) * ends.sum()


def test_operators_of_users_are_counted_by_their_annotations():
    class Model(torch.nn.Module):
        def forward(self, x, y, z, ends):
            return product(x, y), summed(x), experts(x, z, ends)

    args = (torch.ones(6, 4), torch.ones(4, 5), torch.ones(3, 4, 5), torch.ones(3))
    graph = capture(Model(), args)
    assert [arithmetic(graph, node) for node in graph.nodes] == [240, None, 240]


def test_what_is_no_contraction_has_no_arithmetic():
    graph, node = graph_of("gelu.default", real(10))
    assert arithmetic(graph, node) is None
    assert element_operations(graph, node) == 10 * ROWS["aten.gelu.default"].elements
    graph, node = graph_of("max_pool2d.default", real(1, 2, 8, 8), [2, 2])
    assert element_operations(graph, node) % (2 * 4 * 4 * 4) == 0 < element_operations(graph, node)
    assert element_operations(*graph_of("relu.default", real(10))) == 0


def test_rows_name_operators_that_exist():
    for op, row in ROWS.items():
        if op.startswith("aten.") and not re.search("(flash|efficient)_attention", op):
            assert resolve(op)
        assert row.elements > 0 or row.backward_elements == 0


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
