"""Cross entropy as one operator, and its gradient as one.

    _log_softmax, nll_loss_forward                 shardwright::cross_entropy
    nll_loss_backward, _log_softmax_backward_data  shardwright::cross_entropy_bwd

They are fused where scores are [n, c] and classes [n]; the log-probabilities are still a result,
for whatever reads them. Losses and gradients keep their rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from shardwright.compiler.passes.rewriter import (
    Rewriter,
    Tensor,
    arguments,
    same_layout,
)
from shardwright.ir import IRGraph, IRNode
from shardwright.kernels.operators import CROSS_ENTROPY, CROSS_ENTROPY_BACKWARD

_LOG_SOFTMAX = "aten._log_softmax.default"
_LOSS = "aten.nll_loss_forward.default"
_LOSS_BACKWARD = "aten.nll_loss_backward.default"
_LOG_SOFTMAX_BACKWARD = "aten._log_softmax_backward_data.default"


def fuse_losses(graph: IRGraph) -> IRGraph:
    """The graph with cross entropies in one piece."""
    nodes = graph.node_by_id()
    place = {node.id: i for i, node in enumerate(graph.nodes)}
    forward = _forwards(graph, nodes, place)
    backward = _backwards(graph, nodes)
    absorbed = set(forward.values()) | set(backward.values())
    if not absorbed:
        return graph
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        if node.id in forward:
            _write_forward(rewriter, nodes[forward[node.id]], node)
        elif node.id in backward:
            _write_backward(rewriter, nodes[backward[node.id]], node)
        elif node.id not in absorbed:
            rewriter.keep(node)
    return rewriter.finish()


def _forwards(
    graph: IRGraph, nodes: Mapping[int, IRNode], place: Mapping[int, int]
) -> dict[int, int]:
    """Losses by node id, and the log-softmax that is done with each: where it is read no sooner."""
    found: dict[int, int] = {}
    for node in graph.nodes:
        if node.op != _LOSS:
            continue
        value = graph.values[node.inputs[0]]
        source = nodes.get(value.producer) if value.producer is not None else None
        if source is None or not _is_of_classes(graph, source, _LOG_SOFTMAX):
            continue
        if min(value.users, key=place.__getitem__) == node.id:
            found[node.id] = source.id
    return found


def _backwards(graph: IRGraph, nodes: Mapping[int, IRNode]) -> dict[int, int]:
    """Gradients of log-softmaxes by node id, and the gradient of the loss that each reads alone."""
    found: dict[int, int] = {}
    for node in graph.nodes:
        if not _is_of_classes(graph, node, _LOG_SOFTMAX_BACKWARD):
            continue
        gradient = graph.values[node.inputs[0]]
        source = nodes.get(gradient.producer) if gradient.producer is not None else None
        alone = gradient.users == [node.id] and gradient.role == "tmp"
        if source is None or source.op != _LOSS_BACKWARD or not alone:
            continue
        if source.inputs[1] == node.inputs[1] and gradient.id not in graph.updates.values():
            found[node.id] = source.id
    return found


def _is_of_classes(graph: IRGraph, node: IRNode, op: str) -> bool:
    """Whether a node is ``op`` over the classes of contiguous scores [n, c]."""
    if node.op != op:
        return False
    value, made = graph.values[node.inputs[-1]], graph.values[node.outputs[0]]
    return (
        len(value.shape) == 2
        and node.attrs["dim"] in (1, -1)
        and made.dtype == value.dtype
        and made.strides is None
    )


def _write_forward(rewriter: Rewriter, softmax: IRNode, loss: IRNode) -> None:
    given, values = arguments(loss), rewriter.source.values
    named = {name: given[name] for name in ("target", "weight", "reduction")}
    named |= {"x": Tensor(softmax.inputs[0]), "ignore": given["ignore_index"]}
    outputs = [values[i] for i in (*loss.outputs, softmax.outputs[0])]
    rewriter.write(CROSS_ENTROPY, named, outputs, loss)


def _write_backward(rewriter: Rewriter, loss: IRNode, softmax: IRNode) -> None:
    given, made = arguments(loss), rewriter.source.values[softmax.outputs[0]]
    named = {name: given[name] for name in ("target", "total_weight", "weight", "reduction")}
    named |= {"dloss": given["grad_output"], "log_probs": given["self"]}
    rewriter.write(
        CROSS_ENTROPY_BACKWARD, named | {"ignore": given["ignore_index"]}, [made], softmax
    )


# --- means ----------------------------------------------------------------------------------------
#
#     labels = sum(target != ignore)
#     cross_entropy(x, target, sum) / labels                  cross_entropy(x, target, mean)
#     cross_entropy_bwd(dloss / labels, .., sum)              cross_entropy_bwd(dloss, .., mean)
#
# Training steps count labels so that several microbatches can share one denominator. Where there is
# one microbatch, the total weight of a loss without weights is its count of labels: the numbers are
# those of the division.


_MEAN, _SUM = 1, 2
_DIVIDE = "aten.div.Tensor"


class Counted(NamedTuple):
    """A summed loss, its division by a count of labels, and the gradients of the quotient."""

    loss: IRNode
    division: IRNode
    gradients: dict[int, int]
    """Node id of each backward to the gradient of the mean that it is to get."""


def mean_losses(graph: IRGraph) -> IRGraph:
    """The graph with means in place of sums that are divided."""
    nodes = graph.node_by_id()
    found = {c.loss.id: c for node in graph.nodes if (c := _counted(graph, nodes, node))}
    if not found:
        return graph
    gradients = {key: new for c in found.values() for key, new in c.gradients.items()}
    divisions = {c.division.id for c in found.values()}
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        if node.id in found:
            _write_mean(rewriter, found[node.id])
        elif node.id in gradients:
            inputs = [rewriter.now(i) for i in (gradients[node.id], *node.inputs[1:])]
            outputs = [graph.values[i] for i in node.outputs]
            rewriter.emit(node.op, inputs, outputs, node.attrs | {"reduction": _MEAN}, node)
        elif node.id not in divisions:
            rewriter.keep(node)
    return rewriter.finish(prune=True)


def _write_mean(rewriter: Rewriter, counted: Counted) -> None:
    node, values = counted.loss, rewriter.source.values
    outputs = [values[counted.division.outputs[0]], *(values[i] for i in node.outputs[1:])]
    inputs = [rewriter.now(value_id) for value_id in node.inputs]
    rewriter.emit(node.op, inputs, outputs, node.attrs | {"reduction": _MEAN}, node)


def _counted(graph: IRGraph, nodes: Mapping[int, IRNode], node: IRNode) -> Counted | None:
    """The division of a summed loss without weights, where nothing else reads the sum."""
    if node.op != CROSS_ENTROPY or node.attrs["reduction"] != _SUM or len(node.inputs) != 2:
        return None
    loss, total = (graph.values[value_id] for value_id in node.outputs[:2])
    kept = loss.role == "output" or loss.id in graph.updates.values()
    if len(loss.users) != 1 or kept:
        return None
    division = nodes[loss.users[0]]
    if division.op != _DIVIDE or division.inputs[0] != loss.id or len(division.inputs) != 2:
        return None
    count = division.inputs[1]
    same = same_layout(graph.values[count], total)
    if not same or not _counts_labels(graph, nodes, count, node):
        return None
    gradients = dict(_gradients(graph, nodes, node, count))
    readers = [nodes[user].op for user in total.users]
    if len(gradients) != readers.count(CROSS_ENTROPY_BACKWARD):
        return None
    return Counted(node, division, gradients)


def _counts_labels(graph: IRGraph, nodes: Mapping[int, IRNode], count: int, loss: IRNode) -> bool:
    """Whether a value is the number of the loss's targets that are not ignored."""
    total = _maker(graph, nodes, count)
    if total is None or total.op not in ("aten.sum.default", "aten.sum.dim_IntList"):
        return False
    if graph.values[count].shape != () or total.attrs.get("dtype") is not None:
        return False
    cast = _maker(graph, nodes, total.inputs[0])
    if cast is None or cast.op != "aten._to_copy.default":
        return False
    compared = _maker(graph, nodes, cast.inputs[0])
    return (
        compared is not None
        and compared.op == "aten.ne.Scalar"
        and compared.inputs[0] == loss.inputs[1]
        and compared.attrs["other"] == loss.attrs["ignore"]
    )


def _gradients(
    graph: IRGraph, nodes: Mapping[int, IRNode], loss: IRNode, count: int
) -> Iterator[tuple[int, int]]:
    """The loss's backwards that get a gradient divided by the count, and what is divided."""
    for user in graph.values[loss.outputs[1]].users:
        node = nodes[user]
        if node.op != CROSS_ENTROPY_BACKWARD or node.attrs["reduction"] != _SUM:
            continue
        given = arguments(node)
        divided = _maker(graph, nodes, given["dloss"])
        fits = given["total_weight"] == loss.outputs[1] and given["log_probs"] == loss.outputs[2]
        if divided is not None and fits and divided.op == _DIVIDE and len(divided.inputs) == 2:
            gradient, by = divided.inputs
            if by == count and same_layout(graph.values[gradient], graph.values[given["dloss"]]):
                yield node.id, gradient


def _maker(graph: IRGraph, nodes: Mapping[int, IRNode], value_id: int) -> IRNode | None:
    producer = graph.values[value_id].producer
    return None if producer is None else nodes[producer]
