"""Emitters: from an operator's node to the kernel calls that do its work.

A node's calls (`IRNode.emitted`) are found by three roads in turn: views, found by trial; a row of
the table (`KernelRow.from_aten`), where what it gives is legal; and the generic kind, whose blob
holds the operator and its constants. So no operator is refused; only markers are, which stand for
none.

`Builder(ctx=Emitters())` emits as nodes are written, `emit_graph` for a graph that is there. Nodes
that are alike in operator, attributes, operands and in what is read of their results share one
emission, so that a stack of equal layers costs what one layer costs.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import torch

from shardwright.errors import ExecError
from shardwright.ir import IRGraph, IRNode
from shardwright.ir.aliasing import may_return_an_argument
from shardwright.ir.execute import describe_node
from shardwright.ir.operators import flatten_results, is_marker, join_call
from shardwright.ir.tensor_meta import TensorMeta
from shardwright.ir.values import Emitted
from shardwright.kernels.files import check_call
from shardwright.kernels.generic import emit_generic
from shardwright.kernels.lowered import BY_ID, BY_NAME, EMITTERS, BaseView
from shardwright.kernels.row import ABSENT, NodeCall
from shardwright.torch_internals import OpOverload, storage_key

Emitteds = tuple[Emitted, ...]


class Emitters:
    """The backend's emitters, as a `Builder`'s ``ctx``; remembers what it emitted."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Emitteds] = {}

    def __call__(
        self, graph: IRGraph, node: IRNode, live: Collection[int] | None = None
    ) -> Emitteds:
        """The calls of a node; ``live`` are the values that are read, all where it is None.

        Raises ExecError for a marker.
        """
        if is_marker(node.op):
            raise ExecError(
                f"{describe_node(node)} is a marker of a training step, no operator; lower the "
                "graph of a built pipeline's task (sw.build) instead"
            )
        key = _key(graph, node, live)
        if key not in self._known:
            self._known[key] = _emit_node(graph, node, live)
        return self._known[key]


def emit_graph(graph: IRGraph, emitters: Emitters | None = None) -> IRGraph:
    """The same graph, with the calls of every node that has none yet. Raises ExecError."""
    emitters = emitters or Emitters()
    live = {value_id for node in graph.nodes for value_id in node.inputs}
    live.update(graph.outputs, graph.updates.values())
    for node in graph.nodes:
        if node.emitted is None:
            node.emitted = emitters(graph, node, live)
    return graph


def _key(graph: IRGraph, node: IRNode, live: Collection[int] | None) -> Hashable:
    """What nodes have alike that share an emission."""
    values = graph.values
    kinds = tuple(
        (values[i].shape, values[i].dtype, values[i].strides) for i in (*node.inputs, *node.outputs)
    )
    read = None if live is None else tuple(value_id in live for value_id in node.outputs)
    return node.op, repr(node.attrs), kinds, read, node.absent


def _emit_node(graph: IRGraph, node: IRNode, live: Collection[int] | None) -> Emitteds:
    """The calls of one node, by the first road that takes it."""
    call = NodeCall(BY_NAME, graph, node, live)
    if may_return_an_argument(node.op) and (views := _views(call)) is not None:
        return views
    return _by_a_row(call) or (emit_generic(NodeCall(BY_NAME, graph, node, live)),)


def _by_a_row(call: NodeCall) -> Emitteds | None:
    """What the operator's own emitter gives; None where there is none, or it is not legal."""
    emitter = EMITTERS.get(call.op)
    if emitter is None:
        return None
    try:
        emission = emitter(call)
        found = (emission,) if isinstance(emission, Emitted) else tuple(emission or ())
        for emitted in found:
            _check(call, emitted)
    except ExecError:
        return None
    return found


def _check(call: NodeCall, emitted: Emitted) -> None:
    """Raise ExecError where a call is not one that its kind takes."""
    kind_id, schema, blob = emitted.kind_id, emitted.attr_schema, emitted.attr_blob
    assert kind_id is not None
    assert schema is not None
    assert blob is not None
    kind = BY_ID[kind_id]
    if missing := kind.missing(emitted.inputs, emitted.outputs):
        raise ExecError(f"{kind.name} needs {missing}")
    ins, outs = (
        tuple(None if place == ABSENT else call.of(place) for place in places)
        for places in (emitted.inputs, emitted.outputs)
    )
    check_call(kind_id, schema, blob, ins, outs)


# --- views ---------------------------------------------------------------------------------------


def _views(call: NodeCall) -> Emitteds | None:
    """One call a result, where all results are views that lie as the graph says."""
    views = find_views(call.overload, call.operands[: call.n_inputs], call.attrs)
    if views is None or len(views) != len(call.made):
        return None
    emitted = []
    for view, place in zip(views, call.made, strict=True):
        made = call.of(place)
        if view.shape != made.shape or not made.same_order(view.strides):
            return None
        attrs = {"offset": view.offset, "shape": view.shape, "strides": view.strides}
        emitted.append(call.emit("view", [view.base], [place], **attrs))
    return tuple(emitted)


def find_views(
    overload: OpOverload, inputs: Sequence[TensorMeta], attrs: Mapping[str, Any]
) -> list[BaseView] | None:
    """The operator's results as views, based on inputs by number; None where one is no view.

    The operator runs on tensors without contents. A view has its input's dtype and values: a
    conjugate or negative seen lazily is none.
    """
    tensors = [meta.empty() for meta in inputs]
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            args, kwargs = join_call(overload, tensors, dict(attrs), "meta")
            made = flatten_results(overload(*args, **kwargs))
    except RuntimeError:
        return None  # it reads contents, or torch cannot run it without: a view does neither
    found = [_view(item, tensors) for item in made if isinstance(item, torch.Tensor)]
    return None if None in found or not found else [view for view in found if view is not None]


def _view(made: torch.Tensor, tensors: Sequence[torch.Tensor]) -> BaseView | None:
    for source, tensor in enumerate(tensors):
        if storage_key(made) == storage_key(tensor):
            same = made.dtype == tensor.dtype and not made.is_conj() and not made.is_neg()
            offset = int(made.storage_offset())
            return BaseView(source, offset, tuple(made.shape), made.stride()) if same else None
    return None
