"""Operators written out in smaller ones, where the whole does not split as its parts do.

A cross entropy over a vocabulary that is split needs the largest score and the sum of exponentials
of all slots in its middle, so it is no one program for each part. Written out it is a row of
operators that each split by the catalog: ``amax`` (partial, by max), ``sum`` (partial), ``gather``
(masked, partial). The mean over labels that may be ignored becomes a quotient of two sums.

In comes a graph; out comes the graph with some of its nodes written out, with the same result up
to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from shardwright.ir import Builder, IRGraph, IRNode
from shardwright.ops.call import Call, Emitter, Inputs, Writer
from shardwright.ops.catalog import call_of
from shardwright.ops.catalog_losses import MEAN, NONE

Expansion = Callable[[Emitter, Call, Inputs], Any]


def can_expand(graph: IRGraph, node: IRNode) -> bool:
    """Whether `expand` can write the node out."""
    applies = APPLIES.get(node.op)
    return applies is not None and applies(call_of(graph, node))


def expand(graph: IRGraph, positions: Collection[int]) -> IRGraph:
    """The graph with the nodes at these positions written out.

    What each writes stands in its place, under its module and source line.
    """
    builder = Builder(graph.name)
    mapping: dict[int, int] = {}
    for value_id in graph.inputs:
        mapping[value_id] = builder.copy_value(graph, graph.values[value_id]).id
    for value in graph.stored():
        mapping[value.id] = builder.copy_value(graph, value).id
    for position, node in enumerate(graph.nodes):
        if position in positions:
            assert can_expand(graph, node)
            inputs = [builder.graph.values[mapping[value_id]] for value_id in node.inputs]
            writer = Writer(builder, node.scopes, node.source)
            made = EXPANSIONS[node.op](writer, call_of(graph, node), inputs)
            mapping[node.outputs[0]] = made.id
        else:
            builder.copy_node(graph, node, mapping)
    return builder.finish(
        [mapping[value_id] for value_id in graph.outputs],
        in_structure=graph.in_structure,
        out_structure=graph.out_structure,
        updates={mapping[old]: mapping[new] for old, new in graph.updates.items()},
    )


# --- softmax and its kin --------------------------------------------------------------------------


def shifted(e: Emitter, scores: Any, dims: list[int]) -> tuple[Any, Any]:
    """Scores less the largest of each row, and the largest; no gradient goes through it."""
    largest = e.call("aten.detach.default", e.call("aten.amax.default", scores, dims, True))
    return e.call("aten.sub.Tensor", scores, largest), largest


def log_of_sum(e: Emitter, scores: Any, dim: int) -> Any:
    """The logarithm of the sum of exponentials of each row, as a dimension of 1."""
    exponentials = e.call("aten.exp.default", scores)
    return e.call("aten.log.default", e.call("aten.sum.dim_IntList", exponentials, [dim], True))


def in_dtype(e: Emitter, call: Call, scores: Any) -> Any:
    """The input in the dtype that the call asks for."""
    dtype = call.attrs["dtype"]
    return scores if dtype is None else e.call("aten.to.dtype", scores, dtype)


def softmax(e: Emitter, call: Call, inputs: Inputs) -> Any:
    """Exponentials over their sum."""
    scores, _ = shifted(e, in_dtype(e, call, inputs[0]), [call.dim()])
    exponentials = e.call("aten.exp.default", scores)
    total = e.call("aten.sum.dim_IntList", exponentials, [call.dim()], True)
    return e.call("aten.div.Tensor", exponentials, total)


def log_softmax(e: Emitter, call: Call, inputs: Inputs) -> Any:
    """Scores less the logarithm of the sum of exponentials."""
    scores, _ = shifted(e, in_dtype(e, call, inputs[0]), [call.dim()])
    return e.call("aten.sub.Tensor", scores, log_of_sum(e, scores, call.dim()))


# --- losses ---------------------------------------------------------------------------------------


def cross_entropy(e: Emitter, call: Call, inputs: Inputs) -> Any:
    """The logarithm of the sum of exponentials, less the label's score."""
    classes = class_dim(call)
    scores, _ = shifted(e, inputs[0], [classes])
    total = e.call("aten.squeeze.dim", log_of_sum(e, scores, classes), classes)
    labels, ignored = labels_of(e, call, inputs[1])
    rows = e.call("aten.sub.Tensor", total, picked(e, scores, labels, classes))
    return reduced(e, call, rows, labels, ignored, inputs[2:])


def negative_likelihood(e: Emitter, call: Call, inputs: Inputs) -> Any:
    """The negative of the label's score."""
    labels, ignored = labels_of(e, call, inputs[1])
    rows = e.call("aten.neg.default", picked(e, inputs[0], labels, class_dim(call)))
    return reduced(e, call, rows, labels, ignored, inputs[2:])


def class_dim(call: Call) -> int:
    """Which dimension of the scores is the classes'."""
    return 1 if len(call.inputs[0]) > 1 else 0


def labels_of(e: Emitter, call: Call, target: Any) -> tuple[Any, Any]:
    """Labels, those to be ignored as 0, and where they are to be ignored."""
    ignored = e.call("aten.eq.Scalar", target, call.attrs["ignore_index"])
    return e.call("aten.masked_fill.Scalar", target, ignored, 0), ignored


def picked(e: Emitter, scores: Any, labels: Any, classes: int) -> Any:
    """The score of each row's label."""
    index = e.call("aten.unsqueeze.default", labels, classes)
    return e.call(
        "aten.squeeze.dim", e.call("aten.gather.default", scores, classes, index), classes
    )


def reduced(e: Emitter, call: Call, rows: Any, labels: Any, ignored: Any, weights: Inputs) -> Any:
    """The rows' losses by class weights, without those ignored; summed, or averaged."""
    counts = e.call("aten.ones_like.default", rows)
    if weights:
        counts = e.call("aten.index.Tensor", weights[0], [labels])
        rows = e.call("aten.mul.Tensor", rows, counts)
    rows = e.call("aten.masked_fill.Scalar", rows, ignored, 0)
    if call.attrs["reduction"] == NONE:
        return rows
    total = e.call("aten.sum.default", rows)
    if call.attrs["reduction"] != MEAN:
        return total
    counted = e.call("aten.masked_fill.Scalar", counts, ignored, 0)
    return e.call("aten.div.Tensor", total, e.call("aten.sum.default", counted))


def labels_are_classes(call: Call) -> bool:
    """Whether a loss has a label a row, not a probability a class, and does not smooth them."""
    scores, target = call.inputs[:2]
    return len(target) < len(scores) and not call.attrs.get("label_smoothing")


EXPANSIONS: dict[str, Expansion] = {
    "aten.softmax.int": softmax,
    "aten.log_softmax.int": log_softmax,
    "aten.cross_entropy_loss.default": cross_entropy,
    "aten.nll_loss_nd.default": negative_likelihood,
}
APPLIES: dict[str, Callable[[Call], bool]] = {
    "aten.softmax.int": lambda call: bool(call.inputs[0]),
    "aten.log_softmax.int": lambda call: bool(call.inputs[0]),
    "aten.cross_entropy_loss.default": labels_are_classes,
    "aten.nll_loss_nd.default": labels_are_classes,
}
"""For which calls an expansion is the same."""
