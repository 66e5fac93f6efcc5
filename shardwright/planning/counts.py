"""Means over labels that may be ignored, as quotients whose terms add up over parts of a batch.

``loss = mean over the rows whose label counts`` becomes ``sum over those rows / how many they
are``; with class weights it is the sum of their weights that the sum is divided by. Where the batch
comes in n microbatches, the divisor is the whole batch's, over n, and is made from inputs of the
whole batch: the labels are inputs, or come from inputs row by row, so that the nodes between can be
written again for n times the rows. Where they do not, the step is refused: the mean of what each
microbatch would have is another number. Where a row has a probability for each class, all count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch

from shardwright.errors import GraphError, PlanError
from shardwright.ir import Builder, IRGraph, IRNode, IRValue
from shardwright.ir.tensor_meta import torch_dtype
from shardwright.ops.call import Writer
from shardwright.ops.catalog import dimop_of
from shardwright.ops.independence import identifier_at
from shardwright.ops.rows.reductions import MEAN, SUM
from shardwright.ops.rows.views import RESHAPED

LABELLED = frozenset(
    f"aten.{name}.default" for name in ("cross_entropy_loss", "nll_loss_nd", "nll_loss")
)
"""Losses of scores and labels: inputs are scores, target and maybe class weights."""
_RESHAPE = "aten.reshape.default"
SIZED = {
    "aten.view.default": ("size", _RESHAPE, "shape"),
    "aten._unsafe_view.default": ("size", _RESHAPE, "shape"),
    _RESHAPE: ("shape", _RESHAPE, "shape"),
    "aten.expand.default": ("size", "aten.expand.default", "size"),
}
"""Operators told the size of what they make: as what attribute, and the same of what they are for
the whole batch. There may be no view of that where there is one of a microbatch."""
RESHAPING = RESHAPED.keys() | SIZED.keys()
"""Operators whose result follows from its shape, however a part of them is written."""


Key = tuple[object, ...]


class _WholeBatchValue(NamedTuple):
    """A value of the whole batch, and its batch dimension; None where it has none."""

    value: IRValue
    dim: int | None


@dataclass(slots=True)
class Counts:
    """The quotients of one graph that is written again into a builder.

    `prepare` comes first, for each node, then `write`. ``batch`` has the batch's dimension of
    inputs, ``mapping`` the values here by the original's id.
    """

    graph: IRGraph
    builder: Builder
    mapping: dict[int, int]
    batch: dict[int, int]
    microbatches: int
    whole_inputs: dict[int, IRValue] = field(default_factory=dict)
    """Inputs of the whole batch, by the original input's id."""
    wholes: dict[int, _WholeBatchValue | None] = field(default_factory=dict)
    divisors: dict[Key, IRValue] = field(default_factory=dict)
    """By what they depend on."""
    nodes: Mapping[int, IRNode] = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = self.graph.node_by_id()

    def prepare(self, node: IRNode) -> None:
        """Write what makes the divisor of a loss, where that is done once a step.

        Raises PlanError where that cannot be made before the first microbatch.
        """
        if self.microbatches == 1 or not is_mean_over_labels(self.graph, node):
            return
        found = [self._whole(value_id) for value_id in node.inputs[1:]]
        given = [whole.value for whole in found if whole is not None]
        if len(given) == len(found):
            if found[0] is not None and found[0].dim is not None:
                self._divide_by(node, given)
            return
        where = f" in {node.scope}" if node.scope else ""
        raise PlanError(
            f"{node.op.split('.')[1]}{where} is the mean over labels that do not come from inputs "
            f"row by row, so how many count in all {self.microbatches} microbatches is not known "
            "before the last; give the labels as an input, the whole batch with microbatches=1, or "
            "write the loss with reduction='sum' and divide it by a number"
        )

    def write(self, node: IRNode) -> bool:
        """Write the quotient in place of a loss; False for nodes that are none."""
        if not is_mean_loss(node):
            return False
        inputs = [self._here(value_id) for value_id in node.inputs]
        if not is_mean_over_labels(self.graph, node):
            self._write_quotient(node, inputs, "aten.div.Scalar", _rows(inputs[0]))
            return True
        if self.microbatches == 1:
            self._divide_by(node, inputs[1:])
        divisor = self.divisors.get(_key(node))
        if divisor is None:
            return False
        self._write_quotient(node, inputs, "aten.div.Tensor", divisor)
        return True

    def _write_quotient(
        self, node: IRNode, inputs: Sequence[IRValue], op: str, divisor: IRValue | int
    ) -> None:
        writer = _writer(self.builder, node)
        total = writer.emit(node.op, inputs, {**node.attrs, "reduction": SUM})
        self.mapping[node.outputs[0]] = writer.call(op, total, divisor).id

    def _here(self, value_id: int) -> IRValue:
        return self.builder.graph.values[self.mapping[value_id]]

    # --- the divisor --------------------------------------------------------------------------

    def _divide_by(self, node: IRNode, given: Sequence[IRValue]) -> None:
        """Write a loss's divisor from labels and weights, if no loss before had the same."""
        if _key(node) in self.divisors:
            return
        writer = _writer(self.builder, node)
        made = _count(writer, node, given, self.graph.values[node.outputs[0]].dtype)
        if self.microbatches > 1:
            made = writer.call("aten.div.Scalar", made, self.microbatches)
        self.divisors[_key(node)] = made

    # --- values of the whole batch ------------------------------------------------------------

    def _whole(self, value_id: int) -> _WholeBatchValue | None:
        """A value as the whole batch makes it; None where that takes more than row by row."""
        if value_id not in self.wholes:
            self.wholes[value_id] = self._make_whole(self.graph.values[value_id])
        return self.wholes[value_id]

    def _make_whole(self, value: IRValue) -> _WholeBatchValue | None:
        if value.producer is not None:
            return self._again(self.nodes[value.producer])
        dim = self.batch.get(value.id)
        if dim is None:
            return _WholeBatchValue(self._here(value.id), None)
        shape = [*value.shape]
        shape[dim] *= self.microbatches
        made = self.builder.input(value.name, shape, value.dtype)
        self.whole_inputs[value.id] = made
        return _WholeBatchValue(made, dim)

    def _again(self, node: IRNode) -> _WholeBatchValue | None:
        """A node written for the whole batch."""
        inputs = [self._whole(value_id) for value_id in node.inputs]
        given = [whole for whole in inputs if whole is not None]
        if len(given) < len(inputs) or len(node.outputs) != 1:
            return None
        form = self._form_of_whole(node, given)
        if form is None:
            return None
        op, attrs, dim = form
        values = [whole.value for whole in given]
        return _WholeBatchValue(_writer(self.builder, node).emit(op, values, attrs), dim)

    def _form_of_whole(
        self, node: IRNode, given: Sequence[_WholeBatchValue]
    ) -> tuple[str, dict[str, Any], int | None] | None:
        """The call that a node is for the whole batch, and the batch's dimension of its result."""
        if all(whole.dim is None for whole in given):
            return node.op, node.attrs, None
        forms = [(node.op, node.attrs)]
        if node.op in SIZED:
            name, op, new = SIZED[node.op]
            others = {key: value for key, value in node.attrs.items() if key != name}
            sizes = _longer(node.attrs[name], self.microbatches)
            forms = [(op, {**others, new: size}) for size in sizes]
        for op, attrs in forms:
            if (dim := self._joined_along(node, given, op, attrs)) is not None:
                return op, attrs, dim
        return None

    def _joined_along(
        self, node: IRNode, given: Sequence[_WholeBatchValue], op: str, attrs: dict[str, Any]
    ) -> int | None:
        """Along which dimension a call on the whole batch joins what a node makes of microbatches.

        None where it does not. Its annotation says that, rather than the node's, in which nothing
        is known of a dimension of one row.
        """
        builder = Builder("whole")
        inputs = [builder.input("x", whole.value.shape, whole.value.dtype) for whole in given]
        try:
            builder.emit(op, inputs, attrs)
        except GraphError:
            return None
        bound = dimop_of(builder.graph, builder.graph.nodes[-1])
        first = next(i for i, whole in enumerate(given) if whole.dim is not None)
        if bound is None:
            return None
        identifier = identifier_at(bound, first, cast(int, given[first].dim))
        if identifier is None or bound.length(identifier) % self.microbatches:
            return None
        flow, part = bound.flow(identifier), bound.split(identifier, self.microbatches)[0]
        apart = all(
            carry.dim == whole.dim if carry.kind == "shard" else whole.dim is None
            for carry, whole in zip(flow.inputs, given, strict=True)
        )
        alike = node.op in RESHAPING or (part.plain and part.attrs == node.attrs)
        made, expected = part.outputs[0], self.graph.values[node.outputs[0]].shape
        if not apart or not alike or made is None or made.shape != expected:
            return None
        return flow.outputs[0].dim


def is_mean_loss(node: IRNode) -> bool:
    """Whether a node is the mean of losses of rows of scores."""
    return node.op in LABELLED and node.attrs["reduction"] == MEAN


def is_mean_over_labels(graph: IRGraph, node: IRNode) -> bool:
    """Whether a node is the mean of losses of rows with one label each, some maybe ignored."""
    if not is_mean_loss(node):
        return False
    scores, target = (graph.values[value_id].shape for value_id in node.inputs[:2])
    return len(target) < len(scores)


def _longer(size: Sequence[int], times: int) -> Iterator[list[int]]:
    """A size with one of its numbers so many times as large, each in turn; -1 stays."""
    for dim, number in enumerate(size):
        yield [*size[:dim], number if number == -1 else number * times, *size[dim + 1 :]]


def _rows(scores: IRValue) -> int:
    """How many rows have a score for each class."""
    return scores.numel // scores.shape[min(1, len(scores.shape) - 1)]


def _key(node: IRNode) -> Key:
    """What the divisor of a loss depends on."""
    return node.attrs["ignore_index"], *node.inputs[1:]


def _count(e: Writer, node: IRNode, given: Sequence[IRValue], dtype: str) -> IRValue:
    """How many labels are not ignored, or the sum of their classes' weights."""
    labels, *weights = given
    if weights:
        ignored = e.call("aten.eq.Scalar", labels, node.attrs["ignore_index"])
        classes = e.call("aten.masked_fill.Scalar", labels, ignored, 0)
        counted = e.call("aten.index.Tensor", weights[0], [classes])
        counted = e.call("aten.masked_fill.Scalar", counted, ignored, 0)
    else:
        counted = e.call("aten.ne.Scalar", labels, node.attrs["ignore_index"])
    exact = torch.float64 if dtype == "f64" else torch.float32
    total = e.call("aten.sum.default", counted, dtype=exact)
    wanted = torch_dtype(dtype)
    return total if wanted == exact else e.call("aten.to.dtype", total, wanted)  # type: ignore[no-any-return]


def _writer(builder: Builder, node: IRNode) -> Writer:
    return Writer(builder, node.scopes, node.source)
