"""The work of a node, and how long a device takes for work.

Comes in: a node, or a `Part` of it, and which values want gradients. Goes out: `Work`, the
operations and bytes of its forward, of the gradients of what nodes made, and of those of stored
values; bytes are those of the tensors that a slot has. A device takes the longest of three times
for it, and the time to start its operators: of products, of memory traffic, and, on a CPU, of
functions of single elements (the roofline; Williams, Waterman and Patterson, 2009). A CPU takes
time for large new tensors beside that, since the system hands it empty pages.

What always holds: no time is negative, more work never takes less, and a view takes none.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from shardwright.clusters import DeviceModel
from shardwright.costs.operations import (
    ADD_PASSES,
    EFFICIENCY,
    ELEMENTS,
    FILLS,
    JOINS,
    LOOKUP,
    LOOKUP_BACKWARD,
    LOOKUPS,
    NORMS,
    PASSES_ON,
    TABLE_PASSES,
    VIEW_PASSES,
    arithmetic,
    element_operations,
)
from shardwright.costs.part import WHOLE, Part
from shardwright.costs.saved import saved_for_backward
from shardwright.costs.views import moves_nothing
from shardwright.ir import IRGraph, IRNode, IRValue
from shardwright.ir.dtypes import itemsize
from shardwright.ir.operators import is_marker

HALF = ("bf16", "f16")
LARGE = 2**25
"""Bytes from which the C library gives each new tensor pages of its own (its largest threshold)."""
PAGING = 4e9
"""Bytes a second in which a CPU gets such pages; measured: 3.9e9."""


class Work(NamedTuple):
    """What a device is given to do.

    operations
        Of products: multiplications and additions, at the rate of large matrices.
    elements
        Operations on single elements, which GPUs do while they wait for memory.
    nbytes
        To and from memory.
    largest
        Bytes of the largest tensor that is made.
    calls
        How many operators are started.
    half
        Whether products are of half precision.
    """

    operations: float = 0.0
    elements: float = 0.0
    nbytes: float = 0.0
    largest: int = 0
    calls: int = 0
    half: bool = False


NONE = Work()


class NodeWork(NamedTuple):
    """Work of a node, its fields as those of `NodeCost`."""

    forward: Work = NONE
    backward: Work = NONE
    weight: Work = NONE


def seconds(device: DeviceModel, work: Work) -> float:
    """How long a device takes for some work."""
    flops = (work.half and device.half_flops) or device.flops
    on_cpu = device.kind == "cpu"
    busy = max(
        work.operations / flops,
        work.elements / device.flops if on_cpu else 0.0,
        work.nbytes / device.bandwidth,
    )
    if on_cpu and work.largest >= LARGE:
        busy += work.largest / PAGING
    return busy + work.calls * device.overhead


def node_work(
    graph: IRGraph, node: IRNode, needing: Collection[int], part: Part = WHOLE
) -> NodeWork:
    """The work of a part of a node where the values ``needing`` want gradients.

    A marker's forward is its step: an optimizer's moves what it reads and makes; a ``Backward``
    does nothing that its nodes' backwards do not.
    """
    call = _Call(graph, node, needing, part)
    if is_marker(node.op):
        return NodeWork(Work() if node.op in ("Backward", "zero_grad") else call.moving())
    if moves_nothing(graph, node, part.shapes_of(graph, node)):
        return NodeWork(NONE, call.view_backward())
    operations = arithmetic(graph, node)
    if operations is not None:
        return call.product(operations / part.work / EFFICIENCY.get(node.op, 1.0))
    return call.lookup() if node.op == LOOKUP else call.function()


class _Call:
    """A node's inputs and outputs, and which of the inputs want gradients."""

    def __init__(self, graph: IRGraph, node: IRNode, needing: Collection[int], part: Part) -> None:
        self._graph, self._node, self._work = graph, node, part.work
        values = graph.values
        shapes = part.shapes_of(graph, node)
        self._nbytes = {
            v: math.prod(shape) * itemsize(values[v].dtype) for v, shape in shapes.items()
        }
        self._inputs = [values[v] for v in dict.fromkeys(node.inputs)]
        self._outputs = _read(graph, [values[v] for v in node.outputs])
        reached = any(v in needing for v in node.outputs)
        wanted = [value for value in self._inputs if reached and value.id in needing]
        self._made = [value for value in wanted if not value.is_stored]
        self._stored = [value for value in wanted if value.is_stored]
        self._moved = self._bytes(self._inputs) + self._bytes(self._outputs)

    def moving(self) -> Work:
        """What is given and what is made, each moved once."""
        return Work(nbytes=self._moved, largest=self._largest(self._outputs), calls=1)

    def view_backward(self) -> Work:
        """Gradients of parts are put together, those of copies added up; others are views too."""
        if not self._made or self._node.op not in VIEW_PASSES:
            return NONE
        of_input, of_output = VIEW_PASSES[self._node.op]
        moved = of_input * self._bytes(self._made[:1]) + of_output * self._bytes(self._outputs)
        return Work(nbytes=moved, largest=self._largest(self._made[:1]), calls=1)

    def product(self, operations: float) -> NodeWork:
        """Each factor's gradient is a product as large as the forward; that of a bias is a sum."""
        half = bool(self._outputs) and self._outputs[0].dtype in HALF
        forward = Work(
            operations, nbytes=self._moved, largest=self._largest(self._outputs), calls=1, half=half
        )

        def gradients(wanted: Sequence[IRValue], added_to: int) -> Work:
            """Of some inputs; what they are added to is read as well."""
            factors = [value for value in wanted if len(value.shape) > 1]
            others = self._bytes(self._outputs) * (len(wanted) - len(factors))
            moved = (self._moved * len(factors)) + others + added_to * self._bytes(wanted)
            return Work(
                operations * len(factors), 0.0, moved, self._largest(wanted), len(wanted), half
            )

        return NodeWork(forward, gradients(self._made, 0), gradients(self._stored, 1))

    def lookup(self) -> NodeWork:
        """The rows are read and written; the gradient is as large as the table."""
        rows = Work(
            nbytes=2 * self._bytes(self._outputs), largest=self._largest(self._outputs), calls=1
        )
        tables = Work(
            nbytes=TABLE_PASSES * self._bytes(self._stored),
            largest=self._largest(self._stored),
            calls=len(self._stored),
        )
        return NodeWork(rows, NONE, tables)

    def function(self) -> NodeWork:
        """All other operators take the time of their bytes, or of their function's operations."""
        once = element_operations(self._graph, self._node) / self._work
        both = ELEMENTS.get(self._node.op)
        rest = both * self._inputs[0].numel / self._work - once if both else 0.0
        forward = self.moving()._replace(elements=once, nbytes=self._forward_bytes())
        if self._node.op in JOINS:
            return NodeWork(forward)
        if not self._made:
            return NodeWork(forward, NONE, self._gradients(self._stored, rest))
        backward = self._gradients(self._made, rest)
        if self._stored and self._node.op in NORMS:
            one_pass_more = self._bytes(self._outputs) + self._bytes(self._stored)
            return NodeWork(forward, backward, Work(nbytes=one_pass_more))
        return NodeWork(forward, backward, self._gradients(self._stored, 0.0))

    def _forward_bytes(self) -> int:
        if self._node.op in FILLS:
            return self._bytes(self._outputs)
        if self._node.op == LOOKUP_BACKWARD:
            return (TABLE_PASSES - ADD_PASSES) * self._bytes(self._outputs)
        return 2 * self._bytes(self._outputs) if self._node.op in LOOKUPS else self._moved

    def _gradients(self, wanted: Sequence[IRValue], elements: float) -> Work:
        """Each reads the output's and what is saved, and is written; a repeated one is added up."""
        given = self._bytes(self._outputs)
        if self._node.op in NORMS and wanted:
            return self._in_one_pass(wanted, elements)
        moved, calls, largest = 0, 0, 0
        for value in wanted:
            read = saved_for_backward(self._graph, self._node, (value.id,), {})
            is_repeated = self._is_repeated(value)
            if not read and not is_repeated and self._node.op in PASSES_ON:
                continue  # the gradient is the output's itself
            saved = sum(self._nbytes[v] for v in read)
            again = 2 * given if is_repeated and read else 0  # the product, before it is added up
            moved += given + saved + again + self._nbytes[value.id]
            calls += 2 if again else 1
            largest = max(largest, self._nbytes[value.id], given if again else 0)
        return Work(0.0, elements, moved, largest, calls) if calls else NONE

    def _in_one_pass(self, wanted: Sequence[IRValue], elements: float) -> Work:
        """The output's gradient and what is saved are read once for all."""
        numbers = [value.id for value in wanted]
        saved = saved_for_backward(self._graph, self._node, numbers, {})
        moved = self._bytes((*self._outputs, *wanted)) + sum(self._nbytes[v] for v in saved)
        return Work(0.0, elements, moved, self._largest(wanted), 1)

    def _is_repeated(self, value: IRValue) -> bool:
        """Whether each element of an input is used for several of the output."""
        return bool(self._outputs) and value.numel < self._outputs[0].numel

    def _bytes(self, values: Iterable[IRValue]) -> int:
        """What the part has of some values."""
        return sum(self._nbytes[value.id] for value in values)

    def _largest(self, values: Iterable[IRValue]) -> int:
        return max((self._nbytes[value.id] for value in values), default=0)


def _read(graph: IRGraph, outputs: list[IRValue]) -> list[IRValue]:
    """Those of several that anything reads: an optimizer gives its gradients back unchanged."""
    if len(outputs) < 2 or all(value.users for value in outputs):
        return outputs
    given = {*graph.outputs, *graph.updates.values()}
    return [value for value in outputs if value.users or value.id in given] or outputs
