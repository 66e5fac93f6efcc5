"""Nodes of a graph replaced by other nodes that make the same values.

Comes in: a graph, and a rule that gives a node in the place of another, or None. Goes out: the
graph with those nodes; values keep their ids, and those that nothing reads any more stay behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardwright.dimops.catalog_losses import MEAN, SUM
from shardwright.ir import IRGraph, IRNode, IRValue
from shardwright.ir.dropout import DROPOUT
from shardwright.planning.counts import LABELLED

Makers = dict[int, IRNode]
"""The node that makes a value, by value id."""

Rule = Callable[[IRGraph, IRNode, Makers], IRNode | None]


def with_rule(graph: IRGraph, rule: Rule) -> IRGraph:
    """The graph with the rule's nodes; the graph itself where there are none."""
    makers = {value_id: node for node in graph.nodes for value_id in node.outputs}
    found = [rule(graph, node, makers) for node in graph.nodes]
    if not any(found):
        return graph
    return with_nodes(graph, [new or old for new, old in zip(found, graph.nodes, strict=True)])


def with_nodes(graph: IRGraph, nodes: list[IRNode]) -> IRGraph:
    """The graph with these nodes alone; every value of it stays."""
    users: dict[int, list[int]] = {value_id: [] for value_id in graph.values}
    for node in nodes:
        for value_id in dict.fromkeys(node.inputs):
            users[value_id].append(node.id)
    values = {v: replace(value, users=users[v]) for v, value in graph.values.items()}
    return replace(graph, values=values, nodes=nodes)


def torch_dropout(graph: IRGraph, node: IRNode, makers: Makers) -> IRNode | None:
    """Torch's dropout, which draws from torch's random numbers, for the one that counts."""
    if node.op != DROPOUT:
        return None
    attrs = {"p": node.attrs["p"], "train": True}
    return replace(node, op="aten.dropout.default", inputs=node.inputs[:1], attrs=attrs)


@dataclass(frozen=True, slots=True)
class Composed:
    """An operator of which another is a part that keeps more for a backward.

    Arguments have the same names in both; ``attrs`` are those that the part lacks. It fits calls
    whose attributes are ``required``.
    """

    op: str
    attrs: Mapping[str, Any] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()


_COMPOSED = {
    "aten.native_layer_norm.default": Composed(
        "aten.layer_norm.default", attrs={"cudnn_enable": True}
    ),
    "aten.nll_loss_forward.default": Composed("aten.nll_loss.default"),
    "aten._log_softmax.default": Composed(
        "aten.log_softmax.int", {"dtype": None}, {"half_to_float": False}, ("half_to_float",)
    ),
    "aten._softmax.default": Composed(
        "aten.softmax.int", {"dtype": None}, {"half_to_float": False}, ("half_to_float",)
    ),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": Composed(
        "aten.scaled_dot_product_attention.default", {"enable_gqa": False}
    ),
}
"""What the forward of a training step is differentiated as, by what the program called."""


def composed(graph: IRGraph, node: IRNode, makers: Makers) -> IRNode | None:
    """The operator that a program calls, for the part of it whose first result is all it gives."""
    found = _COMPOSED.get(node.op)
    if found is None or node.absent or any(graph.values[v].users for v in node.outputs[1:]):
        return None
    if any(node.attrs[name] != value for name, value in found.required.items()):
        return None
    kept = {name: value for name, value in node.attrs.items() if name not in found.dropped}
    return replace(node, op=found.op, outputs=node.outputs[:1], attrs={**kept, **found.attrs})


def cross_entropy(graph: IRGraph, node: IRNode, makers: Makers) -> IRNode | None:
    """The loss of scores, for that of the logarithms of their softmax over classes."""
    if node.op != "aten.nll_loss.default" or node.inputs[0] not in makers:
        return None
    logarithms = makers[node.inputs[0]]
    classes = len(graph.values[node.inputs[0]].shape) - 1
    if logarithms.op != "aten.log_softmax.int" or logarithms.attrs["dtype"] is not None:
        return None
    if logarithms.attrs["dim"] not in (-1, classes):
        return None
    return replace(
        node,
        op="aten.cross_entropy_loss.default",
        inputs=[logarithms.inputs[0], *node.inputs[1:]],
        attrs={**node.attrs, "label_smoothing": 0.0},
    )


@dataclass(frozen=True, slots=True)
class MeanLosses:
    """Means over labels, for sums that are divided by how many labels count (`planning.counts`).

    ``counted`` are the nodes whose results are such numbers of a whole batch.
    """

    counted: frozenset[int]

    def __call__(self, graph: IRGraph, node: IRNode, makers: Makers) -> IRNode | None:
        """The mean in the place of a quotient."""
        made = [makers[value_id] for value_id in node.inputs if value_id in makers]
        if node.op != "aten.div.Tensor" or len(made) < 2:  # it may divide by a number
            return None
        total, divisor = made
        if total.op not in LABELLED or total.attrs["reduction"] != SUM:
            return None
        if divisor.id not in self.counted and not _counts_labels(total, divisor, makers):
            return None
        attrs = {**total.attrs, "reduction": MEAN}
        return replace(total, id=node.id, outputs=node.outputs, attrs=attrs)


def _counts_labels(loss: IRNode, divisor: IRNode, makers: Makers) -> bool:
    """Whether a node makes the number of labels of a loss that are not ignored."""
    if divisor.op == "aten.to.dtype":
        divisor = makers.get(divisor.inputs[0], divisor)
    if divisor.op != "aten.sum.default" or len(loss.inputs) != 2:
        return False
    counted = makers.get(divisor.inputs[0])
    return (
        counted is not None
        and counted.op == "aten.ne.Scalar"
        and counted.inputs == loss.inputs[1:]
        and counted.attrs["other"] == loss.attrs["ignore_index"]
    )


def whole_table(graph: IRGraph, node: IRNode, makers: Makers) -> IRNode | None:
    """One lookup in a whole table, for lookups in its columns that are put side by side."""
    if node.op != "aten.cat.default" or len(node.inputs) < 2:
        return None
    lookups = [makers.get(value_id) for value_id in node.inputs]
    found = [lookup for lookup in lookups if lookup and lookup.op == "aten.embedding.default"]
    made = graph.values[node.outputs[0]]
    last = node.attrs["dim"] in (-1, len(made.shape) - 1)
    alike = {(lookup.inputs[1], repr(lookup.attrs)) for lookup in found}
    if len(found) < len(lookups) or not last or len(alike) > 1:
        return None
    table = _joined(graph, [graph.values[lookup.inputs[0]] for lookup in found])
    if table is None:
        return None
    return replace(found[0], id=node.id, inputs=[table, found[0].inputs[1]], outputs=node.outputs)


def _joined(graph: IRGraph, parts: list[IRValue]) -> int | None:
    """The stored value whose columns the parts are, in order; None where they are not that."""
    first = parts[0]
    if not all(part.is_stored and part.names == first.names for part in parts):
        return None
    ranges = [part.placements or tuple((0, size) for size in part.shape) for part in parts]
    rows, columns = {taken[0] for taken in ranges}, [taken[1] for taken in ranges]
    ends = [0, *(end for _, end in columns)]
    if len(rows) > 1 or [start for start, _ in columns] != ends[:-1]:
        return None
    made = graph.new_value(
        first.names[0],
        (first.shape[0], ends[-1]),
        first.dtype,
        role=first.role,
        names=first.names,
        placements=(*rows, (0, ends[-1])),
    )
    made.persistent = first.persistent
    return made.id
