"""What always holds of a graph, as checks that name the node and the value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.errors import GraphError
from shardwright.ir.dtypes import DTYPES
from shardwright.ir.operators import count_inputs, is_marker, resolve, signature
from shardwright.ir.structure import leaves
from shardwright.ir.values import IRNode, IRValue

if TYPE_CHECKING:
    from shardwright.ir.graph import IRGraph


def validate(graph: IRGraph) -> None:
    """Raise GraphError at the first rule that ``graph`` breaks."""
    for value in graph.values.values():
        _check_value(graph, value)
    _check_names(graph)
    _check_order(graph)
    _check_users(graph)
    for node in graph.nodes:
        _check_call(graph, node)
    _check_ends(graph)


def _check_value(graph: IRGraph, value: IRValue) -> None:
    where = f"value %{value.name}"
    if graph.values.get(value.id) is not value:
        raise GraphError(f"{where} is not filed under its id {value.id}")
    if value.dtype not in DTYPES:
        raise GraphError(f"{where} has the unknown dtype {value.dtype!r}")
    if any(type(size) is not int or size < 0 for size in value.shape):
        raise GraphError(f"{where} has the shape {value.shape}; sizes are integers from 0 up")
    if value.strides is not None and len(value.strides) != len(value.shape):
        raise GraphError(f"{where} has {len(value.strides)} strides for {len(value.shape)} sizes")
    if value.is_stored and not value.names:
        raise GraphError(f"{where} is a {value.role} without a name in a checkpoint")
    made = value.role in ("tmp", "output")
    if made != (value.producer is not None):
        raise GraphError(
            f"{where} is {value.role} and has {'no' if made else 'a'} producer; only values of "
            "the roles tmp and output are made by a node"
        )


def _check_names(graph: IRGraph) -> None:
    seen: set[str] = set()
    for value in graph.values.values():
        if value.name in seen:
            raise GraphError(f"two values are named %{value.name}")
        seen.add(value.name)


def _check_order(graph: IRGraph) -> None:
    """Each value has one producer, and it comes before every use."""
    defined = {value.id for value in graph.values.values() if value.producer is None}
    for node in graph.nodes:
        for value_id in (*node.inputs, *node.outputs):
            if value_id not in graph.values:
                raise GraphError(f"{node.op} (node {node.id}) names the unknown value {value_id}")
        for value_id in node.inputs:
            if value_id not in defined:
                name = graph.values[value_id].name
                raise GraphError(f"{node.op} (node {node.id}) uses %{name} before it is made")
        for value_id in node.outputs:
            value = graph.values[value_id]
            if value_id in defined or value.producer != node.id:
                raise GraphError(f"%{value.name} is made by {node.op} (node {node.id}) and before")
            defined.add(value_id)
    if undefined := graph.values.keys() - defined:
        names = ", ".join(f"%{graph.values[value_id].name}" for value_id in sorted(undefined))
        raise GraphError(f"{names}: the producer is not a node of the graph")


def _check_users(graph: IRGraph) -> None:
    users: dict[int, list[int]] = {value_id: [] for value_id in graph.values}
    for node in graph.nodes:
        for value_id in dict.fromkeys(node.inputs):
            users[value_id].append(node.id)
    for value_id, found in users.items():
        value = graph.values[value_id]
        if value.users != found:
            raise GraphError(f"%{value.name} lists the users {value.users}, but they are {found}")


def _check_call(graph: IRGraph, node: IRNode) -> None:
    """A call fills its operator's schema, and the operator writes to nothing."""
    if is_marker(node.op):
        return
    overload = resolve(node.op)
    if overload._schema.is_mutable:
        raise GraphError(f"{node.op} (node {node.id}) writes to its input; graphs are functional")
    parameters = {parameter.name for parameter in signature(overload).parameters}
    expected = len(parameters) - len(node.attrs) + sum(map(count_inputs, node.attrs.values()))
    if node.attrs.keys() - parameters or expected != len(node.inputs):
        raise GraphError(
            f"{node.op} (node {node.id}) has {len(node.inputs)} inputs and the attributes "
            f"{', '.join(node.attrs) or 'none'}; its schema is {overload._schema}"
        )


def _check_ends(graph: IRGraph) -> None:
    """Inputs, outputs and updates name the right values and fit the structures."""
    by_role = [value.id for value in graph.values.values() if value.role == "input"]
    if sorted(graph.inputs) != sorted(by_role):
        raise GraphError("graph.inputs and the values of role input are not the same")
    for value_id in (*graph.outputs, *graph.updates, *graph.updates.values()):
        if value_id not in graph.values:
            raise GraphError(f"outputs or updates name the unknown value {value_id}")
    for old, new in graph.updates.items():
        _check_update(graph.values[old], graph.values[new])
    for structure, ids, kind in (
        (graph.in_structure, graph.inputs, "inputs"),
        (graph.out_structure, graph.outputs, "outputs"),
    ):
        if structure is not None:
            count = sum(1 for _ in leaves(structure))
            if count != len(ids):
                raise GraphError(f"the structure has {count} {kind}, the graph {len(ids)}")


def _check_update(old: IRValue, new: IRValue) -> None:
    if not old.is_stored or (old.shape, old.dtype) != (new.shape, new.dtype):
        raise GraphError(
            f"%{new.name} {new.dtype}{list(new.shape)} cannot replace %{old.name} "
            f"({old.role}) {old.dtype}{list(old.shape)}"
        )
