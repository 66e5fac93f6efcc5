"""Operators written out: the same result, each node in the catalog, classes split."""

import pytest
import torch

from shardwright.ir import Builder, compile_graph
from shardwright.ops import can_expand, dimop_of, expand
from tests.ops.splitting import join, sliced

ROWS, CLASSES = 7, 10


def loss(op, reduction=1, weight=False, places=()):
    """A graph of a loss of ``ROWS`` by ``CLASSES``, and inputs with a label that is ignored."""
    torch.manual_seed(0)
    scores = torch.randn(ROWS, CLASSES, *places, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(CLASSES, (ROWS, *places))
    labels[0] = 3
    tensors = [scores, labels]
    builder = Builder("loss")
    values = [builder.input("x", scores.shape, "f64"), builder.input("y", labels.shape, "i64")]
    if weight:
        tensors.append(torch.rand(CLASSES, dtype=torch.float64))
        values.append(builder.input("w", (CLASSES,), "f64"))
    made = builder.call(op, *values[:2], values[2] if weight else None, reduction, 3)
    return builder.finish(made), tensors


def softmax(op):
    torch.manual_seed(0)
    scores = torch.randn(ROWS, CLASSES, dtype=torch.float64, requires_grad=True)
    builder = Builder("softmax")
    return builder.finish(builder.call(op, builder.input("x", scores.shape, "f64"), 1)), [scores]


CALLS = {
    "softmax": lambda: softmax("aten.softmax.int"),
    "log_softmax": lambda: softmax("aten.log_softmax.int"),
    **{
        f"{op}-{reduction}": lambda op=op, reduction=reduction: loss(
            f"aten.{op}.default", reduction
        )
        for op in ("cross_entropy_loss", "nll_loss_nd")
        for reduction in (0, 1, 2)
    },
    "weighted": lambda: loss("aten.cross_entropy_loss.default", 1, weight=True),
    "places": lambda: loss("aten.cross_entropy_loss.default", 1, weight=True, places=(3,)),
}


def run_split(graph, tensors, length, num):
    """Run a graph with every dimension of this length split, node by node; values stay whole."""
    values = dict(zip(graph.inputs, tensors, strict=True))
    split = 0
    for node in graph.nodes:
        bound = dimop_of(graph, node)
        assert bound is not None, node.op
        names = [name for name in bound.identifiers if bound.length(name) == length]
        split += len(names)
        parts = bound.split(names[0], num) if names else [bound.part({})]
        inputs = [values[value_id] for value_id in node.inputs]
        made = [part.run(list(map(sliced, inputs, part.inputs))) for part in parts]
        values |= dict(zip(node.outputs, join(bound, parts, made), strict=True))
    return [values[value_id] for value_id in graph.outputs], split


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("length", [ROWS, CLASSES])
def test_a_written_out_operator_splits_by_rows_and_by_classes(name, length):
    graph, tensors = CALLS[name]()
    (expected,) = compile_graph(graph)(tensors)
    written = expand(graph, [0])
    assert len(written.nodes) > 3
    (made,), split = run_split(written, tensors, length, 3)
    assert split >= (1 if name.startswith("nll") else 3)
    torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(expected)
    (wanted,) = torch.autograd.grad(expected, tensors[0], direction)
    (got,) = torch.autograd.grad(made, tensors[0], direction)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def test_a_loss_against_probabilities_is_not_written_out():
    builder = Builder("loss")
    x, y = (builder.input(name, (ROWS, CLASSES), "f64") for name in "xy")
    graph = builder.finish(builder.call("aten.cross_entropy_loss.default", x, y))
    assert not can_expand(graph, graph.nodes[0])
