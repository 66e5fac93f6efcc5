"""Emitters: from an operator's node to the kernel calls that do its work.

Comes in: a graph, node by node. Goes out: `IRNode.emitted`, the calls, by three roads in turn: a
row of the table of emitters, which may decline; views, found by trial; and the generic kind, whose
blob holds the operator and its constants. So no operator is refused; only markers are, which stand
for no operator.

`Builder(ctx=Emitters())` emits as nodes are written, `emit_graph` for a graph that is there. What
always holds: nodes that are alike in operator, attributes, operands and in what is read of their
results share one emission, so that a stack of equal layers costs what one layer costs.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable, Mapping
from typing import Any

from shardwright.errors import ExecError
from shardwright.ir import IRGraph, IRNode
from shardwright.ir.aliasing import may_return_an_argument
from shardwright.ir.execute import describe_node
from shardwright.ir.operators import is_marker
from shardwright.ir.values import Emitted, Input, to_json
from shardwright.kernels.emitting import contractions, elementwise, layers, memory, optimizers
from shardwright.kernels.emitting.call import Emitter, NodeCall, Place
from shardwright.kernels.spots import same_order
from shardwright.kernels.views import find_views

EMITTERS: Mapping[str, Emitter] = {
    **elementwise.TABLE,
    **contractions.TABLE,
    **layers.TABLE,
    **memory.TABLE,
    **optimizers.TABLE,
}
"""By the operator's full name; an emitter that gives None leaves the node to views and generic."""

Emission = tuple[Emitted, ...]


class Emitters:
    """The backend's emitters, as a `Builder`'s ``ctx``; remembers what it emitted."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Emission] = {}

    def __call__(
        self, graph: IRGraph, node: IRNode, live: Collection[int] | None = None
    ) -> Emission:
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
            self._known[key] = emit_node(graph, node, live)
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


def emit_node(graph: IRGraph, node: IRNode, live: Collection[int] | None = None) -> Emission:
    """The calls of one node, by the first road that takes it."""
    row = EMITTERS.get(node.op)
    if row is not None and (found := row(NodeCall(graph, node, live))):
        return tuple(found)
    call = NodeCall(graph, node, live)
    if may_return_an_argument(node.op) and (views := _views(call)) is not None:
        return views
    copying = memory.COPYING.get(node.op)
    if copying is not None and (found := copying(call)):
        return tuple(found)
    return (_generic(NodeCall(graph, node, live)),)


def _views(call: NodeCall) -> Emission | None:
    """One call a result, where all results are views that lie as the graph says."""
    inputs = [(x.shape, x.dtype, x.strides) for x in call.operands[: call.n_inputs]]
    views = find_views(call.overload, inputs, call.attrs)
    if views is None or len(views) != len(call.made):
        return None
    emitted = []
    for view, place in zip(views, call.made, strict=True):
        made = call.of(place)
        if view.shape != made.shape or not same_order(made.shape, view.strides, made.strides):
            return None
        attrs = {"offset": view.offset, "shape": view.shape, "strides": view.strides}
        emitted.append(call.emit("view", [view.source], [place], **attrs))
    return tuple(emitted)


def _generic(call: NodeCall) -> Emitted:
    """The operator by its name, with its arguments as a file's node has them."""
    text = {
        "args": [to_json(_with_inputs(item)) for item in call.args],
        "kwargs": {key: to_json(_with_inputs(item)) for key, item in call.kwargs.items()},
    }
    written = json.dumps(text, separators=(",", ":"), allow_nan=False)
    return call.emit("generic", [Place(k) for k in range(call.n_inputs)], op=call.op, call=written)


def _with_inputs(argument: Any) -> Any:
    if isinstance(argument, Place):
        return Input(int(argument))
    if isinstance(argument, list):
        return [_with_inputs(item) for item in argument]
    return argument


def _key(graph: IRGraph, node: IRNode, live: Collection[int] | None) -> Hashable:
    """What nodes have alike that share an emission."""
    values = graph.values
    kinds = tuple(
        (values[i].shape, values[i].dtype, values[i].strides) for i in (*node.inputs, *node.outputs)
    )
    read = None if live is None else tuple(value_id in live for value_id in node.outputs)
    return node.op, repr(node.attrs), kinds, read, node.absent
