"""Lowering: a graph whose nodes were emitted, as flat calls on values. Serialization only.

Comes in: an `IRGraph` after `emit_graph`. Goes out: a `LoweredGraph`. What always holds: nothing is
decided here; a call that an emitter did not fill in is an error, and so are attributes that the
kind's schema cannot read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import count

from shardwright.errors import ExecError
from shardwright.ir import IRGraph, IRNode, IRValue
from shardwright.ir.execute import describe_node
from shardwright.ir.values import Emitted
from shardwright.kernels.kinds import kind_of
from shardwright.kernels.lowered import LoweredGraph, LoweredOp, ValueSpec
from shardwright.kernels.row import ABSENT


def lower_graph(graph: IRGraph) -> LoweredGraph:
    """The graph's calls. Raises ExecError where an emitter left a field empty."""
    values = {value.id: _spec(value) for value in graph.values.values()}
    ops: list[LoweredOp] = []
    checked: set[tuple[int, int, bytes]] = set()
    fresh = count(max(values, default=-1) + 1)
    for node in graph.nodes:
        ops += _lower(node, values, fresh, checked)
    return LoweredGraph(
        graph.name,
        values,
        tuple(ops),
        tuple(graph.inputs),
        tuple(graph.outputs),
        dict(graph.updates),
    )


def _spec(value: IRValue) -> ValueSpec:
    return ValueSpec(
        value.id, value.name, value.shape, value.dtype, value.role, value.strides, value.names
    )


def _lower(
    node: IRNode,
    values: dict[int, ValueSpec],
    fresh: Iterator[int],
    checked: set[tuple[int, int, bytes]],
) -> Iterator[LoweredOp]:
    """The calls of a node; ``values`` grows by what lies between them."""
    if node.emitted is None:
        raise ExecError(f"{describe_node(node)} was not emitted; call emit_graph first")
    ids = [*node.inputs, *node.outputs]
    there = set(range(len(node.inputs)))
    for emitted in node.emitted:
        kind_id, schema, blob = _filled(node, emitted)
        if (kind_id, schema, blob) not in checked:
            kind_of(kind_id).unpack(schema, blob)
            checked.add((kind_id, schema, blob))
        for temp in emitted.temps:
            vid = next(fresh)
            name = f"{node.op.split('.')[1]}.{vid}"
            values[vid] = ValueSpec(vid, name, temp.shape, temp.dtype, "tmp")
            ids.append(vid)
        there.update(emitted.outputs)
        if emitted.constraints or emitted.hints:
            kind = kind_of(kind_id)
            kind.check_constraints(emitted.constraints, emitted.hints, describe_node(node))
        _check_saved(node, emitted, there)
        yield LoweredOp(
            kind_id,
            schema,
            blob,
            tuple(ABSENT if place == ABSENT else ids[place] for place in emitted.inputs),
            tuple(ABSENT if place == ABSENT else ids[place] for place in emitted.outputs),
            describe_node(node),
            emitted.constraints,
            emitted.hints,
            tuple(ids[place] for place in emitted.saved),
        )


def _check_saved(node: IRNode, emitted: Emitted, there: Collection[int]) -> None:
    """Raise ExecError where a call saves what is not ``there``: inputs, and what calls made."""
    for place in emitted.saved:
        if place < 0 or place not in there:
            raise ExecError(
                f"{describe_node(node)}: the emitter saves operand {place}, which no call has made "
                "then; operands count from 0, the node's inputs first"
            )


def _filled(node: IRNode, emitted: Emitted) -> tuple[int, int, bytes]:
    """The three fields that make a call."""
    kind_id, schema, blob = emitted.kind_id, emitted.attr_schema, emitted.attr_blob
    fields = {"kind_id": kind_id, "attr_schema": schema, "attr_blob": blob}
    empty = [name for name, value in fields.items() if value is None]
    if kind_id is None or schema is None or blob is None:
        raise ExecError(f"{describe_node(node)}: the emitter left {', '.join(empty)} empty")
    return kind_id, schema, blob
