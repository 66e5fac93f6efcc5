"""Validation: the rules of a graph, as checks that name the node and the value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.errors import GraphError
from shardwright.ir.operators import OperatorSignature, is_marker, listed_inputs, resolve, signature
from shardwright.ir.structure import leaves
from shardwright.ir.tensor_meta import DTYPES, dtype_name
from shardwright.ir.values import IRNode, IRValue, is_attribute
from shardwright.torch_internals import schema_of

if TYPE_CHECKING:
    from shardwright.ir.graph import IRGraph


def validate(graph: IRGraph) -> None:
    """Raise GraphError at the first rule that ``graph`` breaks."""
    for value in graph.values.values():
        _check_value(graph, value)
    _check_names(graph)
    check_order(graph)
    _check_users(graph)
    for node in graph.nodes:
        _check_attributes(node)
        if not is_marker(node.op):
            _check_call(node)
    _check_ends(graph)
    _check_structures(graph)
    _check_contents(graph)


# --- values ---------------------------------------------------------------------------------------


def _check_value(graph: IRGraph, value: IRValue) -> None:
    if graph.values.get(value.id) is not value:
        raise GraphError(f"{_named(value)} is not filed under its id {value.id}")
    if value.dtype not in DTYPES:
        raise GraphError(f"{_named(value)} has the unknown dtype {value.dtype!r}")
    if any(type(size) is not int or size < 0 for size in value.shape):
        raise GraphError(
            f"{_named(value)} has the shape {value.shape}; sizes are integers from 0 up"
        )
    if value.strides is not None and len(value.strides) != len(value.shape):
        raise GraphError(
            f"{_named(value)} has {len(value.strides)} strides for {len(value.shape)} sizes"
        )
    if value.is_stored and not value.names:
        raise GraphError(f"{_named(value)} is a {value.role} without a name in a checkpoint")
    if value.placements is not None and not _covers(value):
        raise GraphError(
            f"{_named(value)}: placements {value.placements} do not give {value.shape}"
        )
    if value.init is not None and (not value.is_stored or value.id in graph.tensors):
        raise GraphError(
            f"{_named(value)} is to begin with {value.init}; that is for stored values without "
            "contents"
        )
    made = value.role in ("tmp", "output")
    if made != (value.producer is not None):
        raise GraphError(
            f"{_named(value)} is {value.role} and has {'no' if made else 'a'} producer; only "
            "values of the roles tmp and output are made by a node"
        )


def _named(value: IRValue) -> str:
    return f"value %{value.name}"


def _covers(value: IRValue) -> bool:
    """Whether the placements' ranges have the sizes of the value."""
    ranges = value.placements or ()
    return value.shape == tuple(end - start for start, end in ranges) and all(
        start >= 0 for start, _ in ranges
    )


def _check_names(graph: IRGraph) -> None:
    seen: set[str] = set()
    for value in graph.values.values():
        if value.name in seen:
            raise GraphError(f"two values are named %{value.name}")
        seen.add(value.name)


# --- nodes ----------------------------------------------------------------------------------------


def _place(node: IRNode) -> str:
    return f"{node.op} (node {node.id})"


def check_order(graph: IRGraph) -> None:
    """Raise GraphError unless each value has one producer, which comes before every use."""
    defined = {value.id for value in graph.values.values() if value.producer is None}
    node_ids: set[int] = set()
    for node in graph.nodes:
        if node.id in node_ids:
            raise GraphError(f"{_place(node)}: another node has the same id")
        node_ids.add(node.id)
        for value_id in (*node.inputs, *node.outputs):
            if value_id not in graph.values:
                raise GraphError(f"{_place(node)} names the unknown value {value_id}")
        for value_id in node.inputs:
            if value_id not in defined:
                name = graph.values[value_id].name
                raise GraphError(f"{_place(node)} uses %{name} before it is made")
        for value_id in node.outputs:
            value = graph.values[value_id]
            if value_id in defined or value.producer != node.id:
                raise GraphError(
                    f"{_place(node)} makes %{value.name}, which is an input, stored, or made by "
                    "another node; a value has one producer"
                )
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


def _check_attributes(node: IRNode) -> None:
    """Attributes are of the kinds that texts and files hold, and name the listed inputs in turn."""
    for name, value in node.attrs.items():
        if not is_attribute(value):
            raise GraphError(
                f"{_place(node)}: the attribute {name} is {value!r}; attributes are None, numbers, "
                "strings, dtypes, layouts, memory formats, SLOT, Input, and lists of these"
            )
    listed = list(listed_inputs(list(node.attrs.values())))
    count = len(node.inputs)
    if listed != list(range(count - len(listed), count)):
        raise GraphError(
            f"{_place(node)} has {count} inputs, and its attributes name {listed}; they must name "
            "the last ones, each once and in order"
        )


def _check_call(node: IRNode) -> None:
    """A call fills its operator's schema, and the operator writes to nothing."""
    overload = resolve(node.op)
    schema = schema_of(overload)
    if schema.is_mutable:
        raise GraphError(f"{_place(node)} writes to its input; graphs are functional")
    if not _fits(node, signature(overload)):
        raise GraphError(
            f"{_place(node)} has {len(node.inputs)} inputs and the attributes "
            f"{', '.join(node.attrs) or 'none'}; its schema is {schema}"
        )
    returned, count = signature(overload).returned, len(node.outputs) + len(node.absent)
    if returned not in (None, count):
        raise GraphError(f"{_place(node)} makes {count} values; its schema is {schema}")
    if list(node.absent) != [i for i in range(count) if i in node.absent]:
        raise GraphError(
            f"{_place(node)} returns {count} things, and {node.absent} are to be absent; the "
            "places are numbers below that, each once and in order"
        )


def _fits(node: IRNode, schema: OperatorSignature) -> bool:
    """Whether attributes and direct inputs together are the arguments of the schema."""
    direct = [p for p in schema.parameters if p.name not in node.attrs]
    listed = sum(1 for _ in listed_inputs(list(node.attrs.values())))
    return (
        len(direct) + len(node.attrs) == len(schema.parameters)
        and len(direct) + listed == len(node.inputs)
        and all(p.takes_tensor for p in direct)
    )


# --- the graph ------------------------------------------------------------------------------------


def _check_ends(graph: IRGraph) -> None:
    """Inputs, outputs and updates name the right values."""
    by_role = [value.id for value in graph.values.values() if value.role == "input"]
    if sorted(graph.inputs) != sorted(by_role):
        raise GraphError("graph.inputs and the values of role input are not the same")
    for value_id in (*graph.outputs, *graph.updates, *graph.updates.values()):
        if value_id not in graph.values:
            raise GraphError(f"outputs or updates name the unknown value {value_id}")
    returned = set(graph.outputs)
    for value in graph.values.values():
        if value.producer is not None and (value.role == "output") != (value.id in returned):
            raise GraphError(
                f"value %{value.name} is {value.role} and is "
                f"{'' if value.id in returned else 'not '}among the graph's outputs"
            )
    for old, new in graph.updates.items():
        _check_update(graph.values[old], graph.values[new])


def _check_update(old: IRValue, new: IRValue) -> None:
    if not old.is_stored or (old.shape, old.dtype) != (new.shape, new.dtype):
        raise GraphError(
            f"%{new.name} {new.dtype}{list(new.shape)} cannot replace %{old.name} "
            f"({old.role}) {old.dtype}{list(old.shape)}"
        )


def _check_structures(graph: IRGraph) -> None:
    """The structures' leaves are the inputs and the outputs, in order, under names of their own."""
    for structure, ids, kind in (
        (graph.in_structure, graph.inputs, "inputs"),
        (graph.out_structure, graph.outputs, "outputs"),
    ):
        if structure is None:
            continue
        found = list(leaves(structure))
        if len(found) != len(ids):
            raise GraphError(f"the structure has {len(found)} {kind}, the graph {len(ids)}")
        if [leaf.index for leaf in found] != list(range(len(ids))):
            raise GraphError(f"the structure does not number the {kind} from 0 up, in order")
        if len({leaf.name for leaf in found}) != len(ids):
            raise GraphError(f"the structure names two of the {kind} alike")


def _check_contents(graph: IRGraph) -> None:
    """Contents belong to stored values and are what these say."""
    for value_id, tensor in graph.tensors.items():
        value = graph.values.get(value_id)
        if value is None or not value.is_stored:
            raise GraphError(f"graph.tensors holds contents for {value_id}, which is not stored")
        if tuple(tensor.shape) != value.shape or dtype_name(tensor.dtype) != value.dtype:
            raise GraphError(
                f"the contents of %{value.name} are {dtype_name(tensor.dtype)}"
                f"{list(tensor.shape)}, the value is {value.dtype}{list(value.shape)}"
            )
