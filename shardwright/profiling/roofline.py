"""The work of a node, and how long a device takes for work.

Comes in: a node, and which of its inputs want gradients. Goes out: `Work`, the operations and bytes
of its forward, of the gradients of what nodes made, and of those of stored values. A device takes
the longer of two times for it, of its arithmetic and of its memory traffic, and the time to start
its operators (the roofline; Williams, Waterman and Patterson, 2009).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardwright.ir import IRGraph, IRNode, IRValue
from shardwright.layout import DeviceModel
from shardwright.profiling.operations import ELEMENTS, FREE, LOOKUP, TABLE_PASSES, arithmetic

FORWARD_SHARE = 0.4
"""How much of the operations in `ELEMENTS` the forward does."""
HALF = ("bf16", "f16")


class Work(NamedTuple):
    """What a device is given to do.

    ``operations`` are floating-point operations, in half precision where ``half``; ``nbytes`` what
    it moves to and from its memory; ``calls`` how many operators it starts.
    """

    operations: float = 0.0
    nbytes: float = 0.0
    calls: int = 0
    half: bool = False

    def __add__(self, other: Work) -> Work:  # type: ignore[override]
        """Both, one after another."""
        return Work(
            self.operations + other.operations,
            self.nbytes + other.nbytes,
            self.calls + other.calls,
            self.half or other.half,
        )


NONE = Work()


class NodeWork(NamedTuple):
    """Work of a node, its fields as those of `NodeCost`."""

    forward: Work = NONE
    backward: Work = NONE
    weight: Work = NONE


def seconds(device: DeviceModel, work: Work, parts: int = 1) -> float:
    """How long a device takes for one of ``parts`` equal parts of some work."""
    flops = (work.half and device.half_flops) or device.flops
    return (
        max(work.operations / flops, work.nbytes / device.bandwidth) / parts
        + work.calls * device.overhead
    )


def node_work(graph: IRGraph, node: IRNode, needing: set[int]) -> NodeWork:
    """The work of a node where the values ``needing`` want gradients."""
    if node.op in FREE:
        return NodeWork()
    inputs = [graph.values[value_id] for value_id in node.inputs]
    outputs = [graph.values[value_id] for value_id in node.outputs]
    made = [v for v in inputs if v.id in needing and not v.is_stored]
    stored = [v for v in inputs if v.id in needing and v.is_stored]
    found = arithmetic(graph, node)
    if found is not None:
        return _contraction(inputs, outputs, made, stored, found)
    if node.op == LOOKUP:
        return _lookup(outputs, stored)
    return _elements(node.op, inputs, outputs, made, stored)


def _contraction(
    inputs: Sequence[IRValue],
    outputs: Sequence[IRValue],
    made: Sequence[IRValue],
    stored: Sequence[IRValue],
    operations: int,
) -> NodeWork:
    """Each matrix's gradient is a product as large as the forward; that of a bias is a sum."""
    half = outputs[0].dtype in HALF

    def gradient(value: IRValue) -> Work:
        read = _bytes(outputs)
        if len(value.shape) < 2:
            return Work(outputs[0].numel, read, 1)
        return Work(operations, read + _bytes(inputs), 1, half)

    return NodeWork(
        Work(operations, _bytes(inputs) + _bytes(outputs), 1, half),
        sum(map(gradient, made), NONE),
        sum(map(gradient, stored), NONE),
    )


def _lookup(outputs: Sequence[IRValue], stored: Sequence[IRValue]) -> NodeWork:
    """The rows are read and written; the gradient is as large as the table."""
    weight = [Work(0, TABLE_PASSES * table.nbytes, 1) for table in stored]
    return NodeWork(Work(0, 2 * _bytes(outputs), 1), NONE, sum(weight, NONE))


def _elements(
    op: str,
    inputs: Sequence[IRValue],
    outputs: Sequence[IRValue],
    made: Sequence[IRValue],
    stored: Sequence[IRValue],
) -> NodeWork:
    """The backward reads the gradient and what the forward read, and writes what it gives."""
    moved = _bytes(inputs) + _bytes(outputs)
    operations = ELEMENTS.get(op, 0) * inputs[0].numel if inputs else 0
    forward = Work(FORWARD_SHARE * operations, moved, 1)
    rest = (1 - FORWARD_SHARE) * operations
    backward = Work(rest, moved, 1) if made else NONE
    weight = Work(rest if not made else 0, _bytes(outputs) + _bytes(stored), 1) if stored else NONE
    return NodeWork(forward, backward, weight)


def _bytes(values: Sequence[IRValue]) -> int:
    return sum(value.nbytes for value in values)
