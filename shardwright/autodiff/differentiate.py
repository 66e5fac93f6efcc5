"""The backward of a run of nodes, written behind them into the same graph.

Input: nodes of a graph under construction, gradients of some values that they make, and the
values whose gradients are wanted. Output: those gradients. Reverse mode, node by node, with the
rule of each from `vjp`; what reaches a value from several uses is added, the last use first, as
autograd does. Values of integers, and what is reached through a detach alone, have no gradient.

Some forward nodes have to give more than before, because the backward reads it: ``layer_norm``
becomes ``native_layer_norm`` with mean and rstd. `Differentiator.replaced` says which and by what.
Invariant: the nodes put in place of one make its outputs under the same ids, so that no
other node changes; values know their producers and users as if the nodes were exchanged already,
which `Differentiator.exchange` does in the graph's own list of nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from shardwright.autodiff.needed import can_have_gradient, needing_gradients
from shardwright.autodiff.vjp import Vjp, VjpCall, Vjps
from shardwright.errors import GraphError
from shardwright.ir import Builder, IRGraph, IRNode, IRValue
from shardwright.ir.execute import describe_node
from shardwright.ir.tensor_meta import contiguous_strides, torch_dtype
from shardwright.ir.values import with_absent


class Differentiator:
    """Differentiates nodes of the graph that ``builder`` writes.

    A node may be differentiated again, for other gradients, as long as its backward saves the same.
    """

    def __init__(self, builder: Builder, vjps: Vjps | None = None) -> None:
        self.replaced: dict[int, list[IRNode]] = {}
        """Forward nodes that have to be replaced, by id, and the nodes to put in their place."""
        self._builder = builder
        self._graph = builder.graph
        self._vjps = Vjps() if vjps is None else vjps
        self._saved: dict[int, tuple[Vjp, list[int]]] = {}

    def backward(
        self,
        nodes: Sequence[IRNode],
        grads: Mapping[int, IRValue],
        wants: Collection[int],
    ) -> dict[int, IRValue]:
        """Write the backward of ``nodes``; gives the gradients of ``wants`` that there are.

        ``grads`` are the gradients, by value id, that come from what reads the nodes' values
        beside them. Raises GraphError where an operator has no derivative.
        """
        wanted = [v for v in wants if can_have_gradient(self._graph, v)]
        depends = needing_gradients(self._graph, wanted, nodes)
        found = dict(grads)
        for node in reversed(nodes):
            gradients = {
                i: found[value_id] for i, value_id in enumerate(node.outputs) if value_id in found
            }
            numbers = [i for i, value_id in enumerate(node.inputs) if value_id in depends]
            if not gradients or not numbers or depends.isdisjoint(node.outputs):
                continue
            for index, gradient in self._through(node, numbers, gradients):
                value_id = node.inputs[index]
                before = found.get(value_id)
                found[value_id] = gradient if before is None else self._add(before, gradient)
        return {value_id: found[value_id] for value_id in wants if value_id in found}

    def exchange(self) -> None:
        """Put the nodes of ``replaced`` into the graph, each in its place; do so at the end."""
        nodes = self._graph.nodes
        nodes[:] = [new for old in nodes for new in self.replaced.get(old.id, [old])]

    # --- one node -----------------------------------------------------------------------------

    def _through(
        self, node: IRNode, wanted: Sequence[int], gradients: Mapping[int, IRValue]
    ) -> Iterator[tuple[int, IRValue]]:
        """Write a node's backward; gives the gradients of its inputs, by number."""
        try:
            vjp = self._vjps.of(VjpCall.of(self._graph, node, wanted, gradients))
        except GraphError as error:
            raise GraphError(f"in {describe_node(node)}: {error}") from error
        saved = self._saved_of(node, vjp)
        by_number = [gradients[i].id for i in sorted(gradients)]
        sources = {
            "input": node.inputs,
            "output": node.outputs,
            "saved": saved,
            "gradient": by_number,
        }
        made = self._write(node, vjp.backward, [sources[what][i] for what, i in vjp.reads])
        for index, given in zip(wanted, vjp.gives, strict=True):
            if given is not None:
                yield index, made[given]

    def _write(self, node: IRNode, graph: IRGraph, inputs: Sequence[int]) -> list[IRValue]:
        """Append a graph's nodes in the scope of ``node``; gives its outputs."""
        mapping = dict(zip(graph.inputs, inputs, strict=True))
        for step in graph.nodes:
            results = self._results(graph, step, mapping)
            self._graph.emit(
                step.op,
                [mapping[value_id] for value_id in step.inputs],
                results,
                step.attrs,
                scopes=node.scopes,
                source=node.source,
            )
        return [self._graph.values[mapping[value_id]] for value_id in graph.outputs]

    def _results(self, graph: IRGraph, step: IRNode, mapping: dict[int, int]) -> list[int | None]:
        """Values for what a node of ``graph`` makes, those that ``mapping`` has not got."""
        for value_id in step.outputs:
            if value_id not in mapping:
                value = graph.values[value_id]
                made = self._builder.value(
                    value.name, value.shape, value.dtype, strides=value.strides
                )
                mapping[value_id] = made.id
        return with_absent([mapping[value_id] for value_id in step.outputs], step.absent)

    def _add(self, total: IRValue, term: IRValue) -> IRValue:
        added: IRValue = self._builder.call("aten.add.Tensor", total, term)
        return added

    # --- what is saved ------------------------------------------------------------------------

    def _saved_of(self, node: IRNode, vjp: Vjp) -> list[int]:
        """What the forward saves; replaces the node where that is more than it makes."""
        if vjp.forward is None:
            return []
        if node.id not in self._saved:
            self._saved[node.id] = vjp, self._replace(node, vjp.forward)
        known, saved = self._saved[node.id]
        assert known.forward == vjp.forward, "a node is differentiated twice, in different ways"
        return saved

    def _replace(self, node: IRNode, forward: IRGraph) -> list[int]:
        """Let the nodes of ``forward`` make what ``node`` makes; gives what they save."""
        count = len(node.outputs)
        mapping = dict(zip(forward.inputs, node.inputs, strict=True))
        again: list[tuple[int, int]] = []
        for made, value_id in zip(forward.outputs[:count], node.outputs, strict=True):
            lies_alike = forward.values[made].strides == self._graph.values[value_id].strides
            if not lies_alike or mapping.setdefault(made, value_id) != value_id:
                again.append((made, value_id))
        written = [self._stand_in(node, forward, step, mapping) for step in forward.nodes]
        for made, value_id in again:
            written += self._hand_on(mapping[made], value_id)
        self._take_over(node, written)
        self.replaced[node.id] = written
        return [mapping[value_id] for value_id in forward.outputs[count:]]

    def _stand_in(
        self, node: IRNode, forward: IRGraph, step: IRNode, mapping: dict[int, int]
    ) -> IRNode:
        """A node of ``forward`` as one of this graph, in no list yet."""
        self._results(forward, step, mapping)
        return IRNode(
            self._graph.fresh_id(),
            step.op,
            [mapping[value_id] for value_id in step.inputs],
            [mapping[value_id] for value_id in step.outputs],
            dict(step.attrs),
            node.scopes,
            node.source,
            step.absent,
        )

    def _hand_on(self, made: int, value_id: int) -> Iterator[IRNode]:
        """Nodes that give an input, or another output, or what lies otherwise, as a value.

        A kernel that saves what its backward reads may order what it makes in another way than the
        one that was thought of; what reads the value relies on the way that it says it lies in.
        """
        values = self._graph.values
        source, target = values[made], values[value_id]
        if source.strides == target.strides:
            yield IRNode(self._graph.fresh_id(), "aten.alias.default", [made], [value_id], {})
            return
        strides = target.strides or contiguous_strides(target.shape)
        order = sorted(range(len(strides)), key=lambda dim: (-strides[dim], -target.shape[dim]))
        lying = source.strides or contiguous_strides(source.shape)
        shape = [source.shape[dim] for dim in order]
        turned = self._builder.value(
            source.name, shape, source.dtype, strides=[lying[dim] for dim in order]
        )
        dense = self._builder.value(source.name, shape, source.dtype)
        back = [order.index(dim) for dim in range(len(order))]
        steps: list[tuple[str, int, int, dict[str, Any]]] = [
            ("aten.permute.default", made, turned.id, {"dims": order}),
            ("aten.clone.default", turned.id, dense.id, {"memory_format": torch.contiguous_format}),
            ("aten.permute.default", dense.id, value_id, {"dims": back}),
        ]
        for op, read, gives, attrs in steps:
            yield IRNode(self._graph.fresh_id(), op, [read], [gives], attrs)

    def _take_over(self, node: IRNode, written: Sequence[IRNode]) -> None:
        """Values know ``written`` as producers and users in place of ``node``."""
        values = self._graph.values
        for value_id in dict.fromkeys(node.inputs):
            users = values[value_id].users
            at = users.index(node.id)
            users[at : at + 1] = [step.id for step in written if value_id in step.inputs]
        made = {value_id for step in written for value_id in step.outputs}
        for step in written:
            for value_id in step.outputs:
                values[value_id].producer = step.id
        for step in written:
            for value_id in dict.fromkeys(step.inputs):
                if value_id in made:
                    values[value_id].users.append(step.id)


# --- accumulation ---------------------------------------------------------------------------------
#
# A gradient added to what was accumulated before it.
#
# Input: an accumulator and a gradient, values of one graph. Output: their sum. Invariant: where the
# gradient is a matrix product that nothing has read yet, product and sum are one ``addmm``, and the
# product itself is left without readers. It is not taken away: the same gradient may be that of
# another value too, as that of ``x`` and ``y`` in ``x + y``.
#
#     %g = mm(%a, %b)                              %g = mm(%a, %b)
#     %s = add(%acc, %g)                     →     %s = addmm(%acc, %a, %b)
#
# A transposed product is the product of the transposed factors:
#
#     %g = t(mm(t(%z), %b))                        %s = addmm(%acc, t(%b), %z)

_TRANSPOSITIONS = frozenset(
    {"aten.t.default", "aten.numpy_T.default", "aten.permute.default", "aten.transpose.int"}
)


def add_into(builder: Builder, accumulator: IRValue, gradient: IRValue) -> IRValue:
    """The sum of both, of the accumulator's shape and dtype."""
    factors = _factors(builder, gradient) if _alike(accumulator, gradient) else None
    total: IRValue
    if factors is not None:
        total = builder.call("aten.addmm.default", accumulator, *factors)
        return total
    total = builder.call("aten.add.Tensor", accumulator, gradient)
    if total.dtype != accumulator.dtype:
        total = builder.call("aten.to.dtype", total, torch_dtype(accumulator.dtype))
    return total


def _alike(accumulator: IRValue, gradient: IRValue) -> bool:
    return (accumulator.shape, accumulator.dtype) == (gradient.shape, gradient.dtype)


def _factors(builder: Builder, gradient: IRValue) -> tuple[IRValue, IRValue] | None:
    """The factors of a gradient that is a product, transposed or not, and has no readers."""
    value, readers, turned = gradient, 0, False
    while len(value.users) == readers and (node := _producer(builder.graph, value)) is not None:
        inputs = [builder.graph.values[value_id] for value_id in node.inputs]
        if node.op == "aten.mm.default":
            a, b = inputs
            return (_transposed(builder, b), _transposed(builder, a)) if turned else (a, b)
        if not _transposes(builder.graph, node):
            return None
        value, readers, turned = inputs[0], 1, not turned
    return None


def _producer(graph: IRGraph, value: IRValue) -> IRNode | None:
    """The node that made a value, one of the latest."""
    if value.producer is None:
        return None
    return next((node for node in reversed(graph.nodes) if node.id == value.producer), None)


def _transposed(builder: Builder, value: IRValue) -> IRValue:
    """The transposition of a matrix: what it is the transposition of, if there is that."""
    node = _producer(builder.graph, value)
    if node is not None and _transposes(builder.graph, node):
        return builder.graph.values[node.inputs[0]]
    turned: IRValue = builder.call("aten.t.default", value)
    return turned


def _transposes(graph: IRGraph, node: IRNode) -> bool:
    """Whether a node makes the transposition of a matrix."""
    if node.op not in _TRANSPOSITIONS:
        return False
    source, made = graph.values[node.inputs[0]], graph.values[node.outputs[0]]
    turned = (source.shape[::-1], _strides(source)[::-1])
    return len(made.shape) == 2 and turned == (made.shape, _strides(made))


def _strides(value: IRValue) -> tuple[int, ...]:
    return value.strides or contiguous_strides(value.shape)
