"""A gradient added to what was accumulated before it.

Input: an accumulator and a gradient, values of one graph. Output: their sum. Invariant: where the
gradient is a matrix product that nothing has read yet, product and sum are one ``addmm``, and the
product itself is left without readers. It is not taken away: the same gradient may be that of
another value too, as that of ``x`` and ``y`` in ``x + y``.

    %g = mm(%a, %b)                              %g = mm(%a, %b)
    %s = add(%acc, %g)                     →     %s = addmm(%acc, %a, %b)

A transposed product is the product of the transposed factors:

    %g = t(mm(t(%z), %b))                        %s = addmm(%acc, t(%b), %z)
"""

from __future__ import annotations

from shardwright.ir import Builder, IRGraph, IRNode, IRValue
from shardwright.ir.tensor_meta import contiguous_strides, torch_dtype

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
