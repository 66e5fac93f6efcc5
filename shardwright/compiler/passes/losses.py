"""Cross entropy as one operator, and its gradient as one.

    _log_softmax, nll_loss_forward                 shardwright::cross_entropy
    nll_loss_backward, _log_softmax_backward_data  shardwright::cross_entropy_bwd

They are fused where scores are [n, c] and classes [n]; the log-probabilities are still a result,
for whatever reads them. Losses and gradients keep their rounding.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.compiler.passes.rewriter import Rewriter, Tensor, arguments
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
