"""The roofline: the work of a node, and how long a device takes for work.

Input: a node, or a `LargestPart` of it, and which values want gradients. Output: `Work`, the
operations and bytes of its forward, of the gradients of what nodes made, and of those of stored
values; bytes are those of the tensors that a slot has. A device takes the longest of three times
for it, and the time to start its operators: of products, of memory traffic, and, on a CPU, of
functions of single elements (the roofline; Williams, Waterman and Patterson, 2009). A CPU takes
time for large new tensors beside that, since the system hands it empty pages.

What single operators do is read from their rows (`ops.call.OperatorRow`); one without a row takes
the time that its bytes take, and what a user's operator does is read from its annotation.

Invariant: no time is negative, more work never takes less, and a view takes none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from shardwright.autodiff.backward import BackwardGraph, backward_of
from shardwright.clusters import DeviceModel
from shardwright.ir import IRGraph, IRNode, IRValue
from shardwright.ir.operators import is_built_in, is_marker, resolve
from shardwright.ir.tensor_meta import contiguous_strides, itemsize
from shardwright.ops.annotation import TensorDims
from shardwright.ops.catalog import ROWS, call_of, dimop_of
from shardwright.sharding.strategy import WHOLE, LargestPart
from shardwright.torch_internals import schema_of

FORMULAS = frozenset(op for op, row in ROWS.items() if row.flops is not None)
"""Operators whose time is in multiplying and adding."""
FREE = frozenset(op for op, row in ROWS.items() if row.free)
"""Views: they move nothing."""
ELEMENTS = {
    op: row.elements + row.backward_elements for op, row in ROWS.items() if row.backward_elements
}
"""Operations for each element of the first input, forward and backward, from times of a CPU core
that does some 120 operations in a nanosecond."""
WINDOWS: Mapping[str, int] = {
    "aten.max_pool2d.default": 550,
    "aten.max_pool2d_with_indices.default": 550,
}
"""Operations for each element of each window, of operators that a CPU does one by one."""

LOOKUP = "aten.embedding.default"
"""Rows of a table: it reads the rows that it writes, and its gradient is as large as the table."""
LOOKUP_BACKWARD = "aten.embedding_dense_backward.default"
INTO_ZEROS = frozenset(("aten.slice_backward.default", "aten.select_backward.default"))
"""They fill with zeros what they make, and write what they are given into it."""
TABLE_PASSES = 7
"""How often the backward of a lookup moves the table's: zeros, rows added, all added to before."""
ADD_PASSES = 3
"""How often an addition of two tensors of a size moves the bytes of one."""
UPDATE_PASSES = 3
"""How often an update moves the bytes of a parameter: it and its gradient are read, it is written.
"""
STATE_PASSES = 2
"""The same of the optimizer's state."""


def arithmetic(graph: IRGraph, node: IRNode) -> int | None:
    """The multiplications and additions of a contraction; None for every other operator."""
    if not is_built_in(node.op) and not is_marker(node.op):
        return _annotated(graph, node)
    row = ROWS.get(node.op)
    return row.flops(call_of(graph, node)) if row is not None and row.flops else None


def element_operations(graph: IRGraph, node: IRNode) -> int:
    """What a CPU does on single elements in one call, where that takes longer than their bytes."""
    if node.op in WINDOWS:
        window: int = math.prod(node.attrs["kernel_size"])
        return WINDOWS[node.op] * graph.values[node.outputs[0]].numel * window
    row = ROWS.get(node.op)
    return row.elements * graph.values[node.inputs[0]].numel if row and row.elements else 0


def _annotated(graph: IRGraph, node: IRNode) -> int | None:
    """Those of a user's operator whose annotation sums over what several inputs have.

    As of a contraction: two operations a point of the space that the outputs' dimensions and those
    that are summed over span. A dimension of one input alone says which part of it is read.
    """
    bound = dimop_of(graph, node)
    if bound is None:
        return None
    annotation = bound.inference.annotation
    given = Counter(name for tensor in annotation.inputs for name in _identifiers(tensor))
    summed = {name for name, kind in annotation.reductions().items() if kind == "+"}
    summed &= {name for name, times in given.items() if times > 1}
    made = {name for tensor in annotation.outputs for name in _identifiers(tensor)}
    return 2 * math.prod(bound.length(name) for name in summed | made) if summed else None


def _identifiers(tensor: TensorDims) -> set[str]:
    return {factor.name for factor in tensor.factors() if isinstance(factor.name, str)}


# --- what moves no memory -------------------------------------------------------------------------


RESHAPES = frozenset(("aten.reshape.default", "aten.flatten.using_ints", "aten.unflatten.int"))
"""Views where the strides allow one, copies where not."""
SAME = frozenset(
    f"aten.{name}"
    for name in (
        "contiguous.default",
        "to.dtype",
        "to.device",
        "to.dtype_layout",
        "to.other",
        "type_as.default",
        "dropout.default",
        "expand_as.default",
    )
)
"""They return their first input itself where that is as it should be."""


def moves_nothing(
    graph: IRGraph, node: IRNode, shapes: Mapping[int, tuple[int, ...]] | None = None
) -> bool:
    """Whether what a node makes lies in the memory of its first input.

    ``shapes`` are those of values where a slot has a part of them.
    """
    if not node.inputs or not node.outputs or is_marker(node.op):
        return False
    source, made = graph.values[node.inputs[0]], graph.values[node.outputs[0]]
    if node.op in RESHAPES:
        shape, target = (shapes[v.id] if shapes else v.shape for v in (source, made))
        return _can_be_seen_as(shape, _strides(source, shape), target)
    if node.op in SAME:
        return _returns_itself(source, made, node)
    return node.op in FREE or _declares_a_view(node.op)


def _returns_itself(source: IRValue, made: IRValue, node: IRNode) -> bool:
    if node.attrs.get("train") and node.attrs.get("p"):
        return False  # dropout
    return (source.shape, source.dtype, source.strides) == (made.shape, made.dtype, made.strides)


def _strides(value: IRValue, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Those of a value; where it is a part, of this shape, it is dense and lies as the whole."""
    whole = value.strides or contiguous_strides(value.shape)
    if shape == value.shape:
        return whole
    found, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (whole[dim], -dim)):
        if whole[dim]:
            found[dim], step = step, step * shape[dim]
    return tuple(found)


@lru_cache(maxsize=4096)
def _can_be_seen_as(
    shape: tuple[int, ...], strides: tuple[int, ...], target: tuple[int, ...]
) -> bool:
    """Whether a tensor can be viewed in another shape; torch says so."""
    try:
        torch.empty_strided(shape, strides, device="meta").view(target)
    except RuntimeError:
        return False
    return True


@lru_cache(maxsize=1024)
def _declares_a_view(op: str) -> bool:
    """Whether the schema says that all that is returned lies in an input's memory."""
    returns = schema_of(resolve(op)).returns
    return bool(returns) and all(item.alias_info is not None for item in returns)


# --- the roofline ---------------------------------------------------------------------------------


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
    moving, row = _moving(graph, node, nbytes), ROWS.get(node.op)
    operations = arithmetic(graph, node)
    if operations is not None:
        half = bool(node.outputs) and graph.values[node.outputs[0]].dtype in HALF
        rate = row.efficiency if row is not None else 1.0
        return moving._replace(operations=operations / work / rate, half=half)
    made = sum(nbytes[value.id] for value in _read_outputs(graph, node))
    if node.op == LOOKUP_BACKWARD:
        moved: float = (TABLE_PASSES - ADD_PASSES) * made
    elif row is not None and row.reads != "all":
        moved = 2 * made if row.reads == "rows" else made
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


# --- what a worker takes beside -------------------------------------------------------------------


COMPUTING = 100e-6
"""Seconds where the worker's core is the device, as measured: with supertasks that fill the caches
130e-6, between tiny ones 70e-6."""
BESIDE = 10e-6
"""Seconds where the device computes meanwhile."""


def worker_seconds(device: DeviceModel) -> float:
    """Seconds for each supertask, of computing or of communication."""
    return COMPUTING if device.kind == "cpu" else BESIDE
