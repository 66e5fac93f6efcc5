"""A graph to `torch.fx` and back, without loss.

`to_fx` gives a GraphModule that runs by itself: placeholders for inputs, attributes for stored
values, one call of an overload a node, ``operator.getitem`` for operators that return several
tensors; it returns the flat outputs, then the updates' new values. What fx has no place for stands
in ``meta``: each fx node carries the `IRValue` or `IRNode` it came from under ``"shardwright"``.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx, nn

from shardwright.errors import GraphError
from shardwright.ir.builder import Builder
from shardwright.ir.graph import IRGraph
from shardwright.ir.operators import (
    flatten_results,
    join_call,
    operator_name,
    resolve,
    signature,
    split_call,
)
from shardwright.ir.values import IRNode, IRValue
from shardwright.torch_internals import OpOverload

META = "shardwright"


def to_fx(graph: IRGraph, device: str = "cpu") -> fx.GraphModule:
    """The graph as a GraphModule whose factories make their tensors on ``device``."""
    root = nn.Module()
    result = fx.Graph()
    made: dict[int, fx.Node] = {}
    for value_id in graph.inputs:
        made[value_id] = _tag(result.placeholder(f"v{value_id}"), graph.values[value_id])
    for value in graph.stored():
        name = f"stored_{value.id}"
        root.register_buffer(name, graph.tensors.get(value.id), persistent=True)
        made[value.id] = _tag(result.get_attr(name), value)
    for node in graph.nodes:
        _add_call(graph, node, result, made, device)
    results = [*graph.outputs, *graph.updates.values()]
    result.output(tuple(made[value_id] for value_id in results))
    module = fx.GraphModule(root, result, class_name="ShardwrightGraph")
    module.meta[META] = graph
    return module


def _tag(node: fx.Node, item: IRValue | IRNode) -> fx.Node:
    node.meta[META] = item
    return node


def _add_call(
    graph: IRGraph, node: IRNode, result: fx.Graph, made: dict[int, fx.Node], device: str
) -> None:
    overload = resolve(node.op)
    inputs = [made[value_id] for value_id in node.inputs]
    args, kwargs = join_call(overload, inputs, node.attrs, torch.device(device))
    call = _tag(result.call_function(overload, args, kwargs), node)
    if signature(overload).returns_one:
        made[node.outputs[0]] = call
        return
    if signature(overload).nested:
        call = result.call_function(flatten_results, (call,))
    for i, value_id in enumerate(node.results):
        if value_id is not None:
            item = result.call_function(operator.getitem, (call, i))
            made[value_id] = _tag(item, graph.values[value_id])


def from_fx(module: fx.GraphModule) -> IRGraph:
    """The graph that `to_fx` made a module of, with what was changed in the module since.

    Nodes that were added there by hand need no ``meta``. Outputs of nodes that were added or
    changed, or that read another kind of tensor than before, are inferred.
    Raises GraphError where the module did not come from `to_fx` or calls anything but operators.
    """
    origin = module.meta.get(META)
    if not isinstance(origin, IRGraph):
        raise GraphError("this GraphModule was not made by to_fx; capture it with sw.capture")
    builder = Builder(origin.name)
    made: dict[fx.Node, Any] = {}
    copied: dict[int, int] = {}
    results: tuple[fx.Node, ...] = ()
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            value = _value_of(node)
            if value.id not in copied:
                copied[value.id] = builder.copy_value(origin, value).id
            made[node] = builder.graph.values[copied[value.id]]
            if value.id in origin.tensors:
                contents = operator.attrgetter(str(node.target))(module)
                builder.graph.tensors[copied[value.id]] = contents
        elif node.op == "output":
            results = cast("tuple[fx.Node, ...]", node.args[0])
        elif node.target is flatten_results:
            made[node] = made[node.args[0]]
        elif node.target is operator.getitem:
            made[node] = made[node.args[0]][node.args[1]]
        else:
            made[node] = _read_call(origin, node, builder, made)
    count = len(origin.outputs)
    if len(results) != count + len(origin.updates):
        raise GraphError(
            f"the module returns {len(results)} tensors; it must return the graph's {count} "
            f"outputs and the new values of its {len(origin.updates)} updates"
        )
    for old in origin.updates:
        if old not in copied:  # fx drops the attribute where nothing reads the old contents
            copied[old] = builder.copy_value(origin, origin.values[old]).id
    values = [made[node] for node in results]
    updates = zip(origin.updates, values[count:], strict=True)
    return builder.finish(
        values[:count],
        in_structure=origin.in_structure,
        out_structure=origin.out_structure,
        updates={copied[old]: new.id for old, new in updates},
    )


def _value_of(node: fx.Node) -> IRValue:
    value = node.meta.get(META)
    if not isinstance(value, IRValue):
        raise GraphError(
            f"{node.op} {node.name} was added after to_fx; add inputs and stored values with a "
            "Builder before it"
        )
    return value


def _read_call(
    origin: IRGraph, node: fx.Node, builder: Builder, made: dict[fx.Node, Any]
) -> IRValue | list[IRValue]:
    overload = node.target
    if not isinstance(overload, OpOverload):
        raise GraphError(f"{node.op} {node.name} calls {node.target}; only operators are allowed")
    inputs, attrs = split_call(
        overload, node.args, dict(node.kwargs), is_tensor=lambda item: isinstance(item, fx.Node)
    )
    values = [made[item] for item in inputs]
    name = operator_name(overload)
    source = node.meta.get(META)
    if not isinstance(source, IRNode):
        return cast("IRValue | list[IRValue]", builder.emit(name, values, attrs))
    read = [origin.values[value_id] for value_id in source.inputs]
    outputs = None
    if (name, attrs, _kinds(values)) == (source.op, source.attrs, _kinds(read)):
        outputs = [
            None
            if value_id is None
            else builder.copy_value(origin, origin.values[value_id], role="tmp")
            for value_id in source.results
        ]
    made_here = builder.emit(
        name, values, attrs, outputs=outputs, scopes=source.scopes, source=source.source
    )
    return cast("IRValue | list[IRValue]", made_here)


def _kinds(values: Sequence[IRValue]) -> list[object]:
    """What the outputs of a call depend on."""
    return [(value.shape, value.dtype, value.strides) for value in values]
