"""The work of a node, and how long a device takes for work.

Input: a node, or a `LargestPart` of it, and which values want gradients. Output: `Work`, the
operations and bytes of its forward, of the gradients of what nodes made, and of those of stored
values; bytes are those of the tensors that a slot has. A device takes the longest of three times
for it, and the time to start its operators: of products, of memory traffic, and, on a CPU, of
functions of single elements (the roofline; Williams, Waterman and Patterson, 2009). A CPU takes
time for large new tensors beside that, since the system hands it empty pages.

Invariant: no time is negative, more work never takes less, and a view takes none.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from shardwright.autodiff.backward import BackwardGraph, backward_of
from shardwright.clusters import DeviceModel
from shardwright.costs.operations import (
    ADD_PASSES,
    EFFICIENCY,
    FILLS,
    INTO_ZEROS,
    LOOKUP_BACKWARD,
    LOOKUPS,
    TABLE_PASSES,
    arithmetic,
    element_operations,
)
from shardwright.costs.views import moves_nothing
from shardwright.ir import IRGraph, IRNode, IRValue
from shardwright.ir.operators import is_marker
from shardwright.ir.tensor_meta import itemsize
from shardwright.sharding.strategy import WHOLE, LargestPart

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


Calls = tuple[tuple[Work, ...], tuple[Work, ...], tuple[Work, ...]]
"""What `NodeWork` sums."""


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
    graph: IRGraph, node: IRNode, needing: Collection[int], part: LargestPart = WHOLE
) -> NodeWork:
    """The work of a part of a node where the values ``needing`` want gradients, in one sum."""
    return NodeWork(*map(_all_work, node_calls(graph, node, needing, part)))


def node_calls(
    graph: IRGraph, node: IRNode, needing: Collection[int], part: LargestPart = WHOLE
) -> Calls:
    """The same, call by call.

    The backward's are those that are recorded for it, and the accumulation of the gradients of
    stored values. A marker's forward is its step: an optimizer's moves what it reads and makes; a
    ``Backward`` does nothing that its nodes' backwards do not.
    """
    values, shapes = graph.values, part.shapes_of(graph, node)
    nbytes = {v: math.prod(shape) * itemsize(values[v].dtype) for v, shape in shapes.items()}
    if is_marker(node.op):
        moves = node.op not in ("Backward", "zero_grad")
        return (_moving(graph, node, nbytes),) if moves else (), (), ()
    forward = (_call_work(graph, node, nbytes, part.work, shapes),)
    if not any(v in needing for v in node.outputs):
        return forward, (), ()
    stored = [v for v in node.inputs if values[v].is_stored]
    found = backward_of(graph, node, needing, stored)
    if found is None:
        return forward, (), ()
    sizes = tuple(nbytes[v] for v in (*node.inputs, *node.outputs))
    return forward, *_backward_calls(found, sizes, part.work)


@lru_cache(maxsize=1 << 14)
def _backward_calls(
    found: BackwardGraph, sizes: tuple[int, ...], work: float
) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    """The calls of B and of W where the call's inputs and outputs have these bytes.

    What is none of these has the same share of its bytes as the part has of the work.
    """
    known = {v: sizes[number] for v, number in found.sizes.items()}
    nodes = (*found.early, *found.late)
    for node in (*nodes, *nodes[::-1]):  # a view is as large as what it shows
        if len(node.inputs) == len(node.outputs) == 1 and _is_view(found.graph, node):
            one, other = node.inputs[0], node.outputs[0]
            if one in known or other in known:
                known.setdefault(one, known.get(other, 0))
                known.setdefault(other, known[one])
    nbytes = {v.id: known.get(v.id, round(v.nbytes / work)) for v in found.graph.values.values()}
    early, late = (
        tuple(_call_work(found.graph, node, nbytes, work) for node in half)
        for half in (found.early, found.late)
    )
    return early, late


def _is_view(graph: IRGraph, node: IRNode) -> bool:
    """Whether a node shows all of its input otherwise."""
    one, other = graph.values[node.inputs[0]], graph.values[node.outputs[0]]
    return one.nbytes == other.nbytes and moves_nothing(graph, node)


def _all_work(works: Sequence[Work]) -> Work:
    """The work of calls one after another."""
    return Work(
        sum(work.operations for work in works),
        sum(work.elements for work in works),
        sum(work.nbytes for work in works),
        max((work.largest for work in works), default=0),
        sum(work.calls for work in works),
        any(work.half for work in works),
    )


def _call_work(
    graph: IRGraph,
    node: IRNode,
    nbytes: Mapping[int, int],
    work: float,
    shapes: Mapping[int, tuple[int, ...]] | None = None,
) -> Work:
    """The work of one call on a part, of whose values these are the bytes and the shapes."""
    if moves_nothing(graph, node, shapes):
        return NONE
    moving = _moving(graph, node, nbytes)
    operations = arithmetic(graph, node)
    if operations is not None:
        half = bool(node.outputs) and graph.values[node.outputs[0]].dtype in HALF
        rate = EFFICIENCY.get(node.op, 1.0)
        return moving._replace(operations=operations / work / rate, half=half)
    made = sum(nbytes[value.id] for value in _read_outputs(graph, node))
    if node.op in FILLS:
        moved: float = made
    elif node.op == LOOKUP_BACKWARD:
        moved = (TABLE_PASSES - ADD_PASSES) * made
    elif node.op in LOOKUPS:
        moved = 2 * made
    else:
        moved = moving.nbytes
    if node.op in INTO_ZEROS:
        moved += 2 * nbytes[node.inputs[0]] - (moved - made)
    return moving._replace(elements=element_operations(graph, node) / work, nbytes=moved)


def _moving(graph: IRGraph, node: IRNode, nbytes: Mapping[int, int]) -> Work:
    """What is given and what is made, each moved once."""
    made = [nbytes[value.id] for value in _read_outputs(graph, node)]
    given = sum(nbytes[v] for v in dict.fromkeys(node.inputs))
    return Work(nbytes=given + sum(made), largest=max(made, default=0), calls=1)


def _read_outputs(graph: IRGraph, node: IRNode) -> list[IRValue]:
    """Those of several that anything reads: an optimizer gives its gradients back unchanged."""
    outputs = [graph.values[v] for v in node.outputs]
    if len(outputs) < 2 or all(value.users for value in outputs):
        return outputs
    given = {*graph.outputs, *graph.updates.values()}
    return [value for value in outputs if value.users or value.id in given] or outputs
