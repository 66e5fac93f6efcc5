"""The ``data`` of an ``FX`` supertask: a graph as JSON text, and back.

    {"version": 1, "inputs": ["i0", "i1"],
     "nodes": [{"name": "n0", "op": "aten.linear.default", "args": [{"ref": "i0"}, {"ref": "i1"},
                null], "kwargs": {}, "outputs": [{"shape": [4, 8], "dtype": "f32"}]}],
     "outputs": [{"ref": "n0"}]}

A reference names an input or a node; ``{"ref": name, "index": i}`` is element i of a node that
makes several tensors; ``null`` stands among the outputs where a call returns no tensor. Every
argument of the operator's schema is written, defaults too; what JSON cannot say is tagged
(`ir.attributes`). Names are positions, so that equal layers give equal text. Inputs have no shape
here: they are the tensors that a supertask binds.

Invariant: ``decode(encode(graph), inputs)`` computes what ``graph`` does, and encodes to
the same text. The text holds no code; decoding calls no operator, and gives only operators that a
file may call, with every argument of their schemas. Whether their results are what the text says,
`graphs.prove` finds out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from shardwright.errors import GraphError
from shardwright.ir import Builder, IRGraph, IRNode, IRValue, resolve
from shardwright.ir.operators import check_written, join_call, signature, split_call
from shardwright.ir.tensor_meta import DTYPES
from shardwright.ir.values import SLOT, Input, from_json, to_json
from shardwright.pipeline.schema import Natural, TensorInfo
from shardwright.torch_internals import OpOverload, schema_of

Places = Mapping[int, "FXReference"]


class FXReference(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A tensor of the text: an input, what a node makes, or one of several things it makes."""

    ref: str
    index: Natural | None = None


class MadeTensor(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A tensor that a node makes; ``strides`` stand where it is not contiguous."""

    shape: tuple[Natural, ...]
    dtype: str
    strides: tuple[Natural, ...] | None = None


class FXNode(Struct, frozen=True, forbid_unknown_fields=True):
    """One operator call; in a parsed text references stand as `FXReference`."""

    name: str
    op: str
    args: list[Any]
    kwargs: dict[str, Any]
    outputs: tuple[MadeTensor | None, ...]

    @property
    def made(self) -> dict[FXReference, MadeTensor]:
        """The tensors that the node makes, in order, by how they are referred to."""
        if len(self.outputs) == 1 and self.outputs[0]:
            return {FXReference(self.name): self.outputs[0]}
        return {FXReference(self.name, i): made for i, made in enumerate(self.outputs) if made}


class FXText(Struct, frozen=True, forbid_unknown_fields=True):
    """A whole graph."""

    version: Literal[1]
    inputs: tuple[str, ...]
    nodes: tuple[FXNode, ...]
    outputs: tuple[FXReference, ...]

    def results(self) -> list[MadeTensor | int]:
        """Each output as what a node makes, or as the position of the input that it is."""
        found: dict[FXReference, MadeTensor | int] = {
            FXReference(name): k for k, name in enumerate(self.inputs)
        }
        for node in self.nodes:
            found.update(node.made)
        return [found[reference] for reference in self.outputs]


# --- writing -------------------------------------------------------------------------------


def encode(graph: IRGraph) -> str:
    """The text of a graph whose tensors all come in as inputs.

    Raises GraphError where the graph has stored values or markers.
    """
    if stored := next(graph.stored(), None):
        raise GraphError(
            f"graph {graph.name!r} stores %{stored.name}; a supertask's constants are inputs"
        )
    return encode_part(graph, graph.nodes, graph.inputs, graph.outputs)


def encode_part(
    graph: IRGraph, nodes: Sequence[IRNode], inputs: Sequence[int], outputs: Sequence[int]
) -> str:
    """The text of some nodes of a graph, in their order, as a graph of their own.

    ``inputs`` are the values that they read from outside, stored ones included, ``outputs`` those
    that are asked for. Raises GraphError where a node is a marker.
    """
    places = {value_id: FXReference(f"i{k}") for k, value_id in enumerate(inputs)}
    encoded = []
    for k, node in enumerate(nodes):
        encoded.append(_encode_node(graph, node, f"n{k}", places))
        places.update(zip(node.outputs, encoded[-1].made, strict=True))
    names = tuple(places[value_id].ref for value_id in inputs)
    results = tuple(places[value_id] for value_id in outputs)
    return msgspec.json.encode(FXText(1, names, tuple(encoded), results)).decode()


def _encode_node(graph: IRGraph, node: IRNode, name: str, places: Places) -> FXNode:
    inputs = [places[value_id] for value_id in node.inputs]
    args, kwargs = join_call(resolve(node.op), inputs, node.attrs, SLOT)
    return FXNode(
        name,
        node.op,
        [_encode_argument(item) for item in args],
        {key: _encode_argument(item) for key, item in kwargs.items()},
        tuple(_encode_result(graph, value_id) for value_id in node.results),
    )


def _encode_result(graph: IRGraph, value_id: int | None) -> MadeTensor | None:
    if value_id is None:
        return None
    value = graph.values[value_id]
    return MadeTensor(value.shape, value.dtype, value.strides)


def _encode_argument(value: Any) -> Any:
    if isinstance(value, FXReference):
        return value
    if isinstance(value, list | tuple):
        return [_encode_argument(item) for item in value]
    return to_json(value)


# --- reading -------------------------------------------------------------------------------


def parse(text: str) -> FXText:
    """The parts of a text, with names, references and dtypes that are right. Raises GraphError."""
    try:
        parsed = msgspec.json.decode(text, type=FXText)
        return _named(parsed)
    except (msgspec.DecodeError, UnicodeEncodeError, ValueError) as error:
        raise GraphError(f"this is not the text of a graph: {error}") from None
    except RecursionError:
        raise GraphError("the text nests deeper than any graph does; it is damaged") from None


def _named(parsed: FXText) -> FXText:
    """The parts with `FXReference` for references, each to what is there. Raises GraphError."""
    names = [*parsed.inputs, *(node.name for node in parsed.nodes)]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise GraphError(f"the name {twice!r} stands twice among the inputs and nodes")
    known = {FXReference(name) for name in parsed.inputs}
    nodes = []
    for node in parsed.nodes:
        args = _bind(node.args, known, node)
        kwargs = {key: _bind(item, known, node) for key, item in node.kwargs.items()}
        nodes.append(msgspec.structs.replace(node, args=args, kwargs=kwargs))
        for reference, made in node.made.items():
            _check_made(made, node)
            known.add(reference)
    for reference in parsed.outputs:
        _check_reference(reference, known, None)
    return msgspec.structs.replace(parsed, nodes=tuple(nodes))


def place_of(node: FXNode | None) -> str:
    """A node in a message."""
    return "the outputs" if node is None else f"node {node.name!r} ({node.op})"


def _bind(data: Any, known: set[FXReference], node: FXNode) -> Any:
    """An argument with `FXReference` for references. Raises GraphError."""
    if isinstance(data, list):
        return [_bind(item, known, node) for item in data]
    if not isinstance(data, dict) or "ref" not in data:
        return data
    try:
        reference = msgspec.convert(data, FXReference)
    except msgspec.ValidationError as error:
        raise GraphError(f"{place_of(node)}: {data!r} is no reference: {error}") from None
    _check_reference(reference, known, node)
    return reference


def _check_reference(reference: FXReference, known: set[FXReference], node: FXNode | None) -> None:
    if reference not in known:
        index = "" if reference.index is None else f" with index {reference.index}"
        raise GraphError(
            f"{place_of(node)}: the reference to {reference.ref!r}{index} is to no input and to "
            "nothing that an earlier node makes"
        )


def _check_made(made: MadeTensor, node: FXNode) -> None:
    if made.dtype not in DTYPES:
        raise GraphError(
            f"{place_of(node)} makes a tensor of the unknown dtype {made.dtype!r}; known are "
            f"{', '.join(DTYPES)}"
        )
    if made.strides is not None and len(made.strides) != len(made.shape):
        raise GraphError(
            f"{place_of(node)} makes a tensor with {len(made.strides)} strides for "
            f"{len(made.shape)} dimensions"
        )


def decode(text: str | FXText, inputs: Sequence[TensorInfo], name: str = "graph") -> IRGraph:
    """The graph of a text, bound to tensors with the shapes and dtypes of ``inputs``.

    Raises GraphError where the text is not a graph's, where an operator is not to be had, or where
    a call does not fit the operator's schema.
    """
    parsed = parse(text) if isinstance(text, str) else text
    if len(parsed.inputs) != len(inputs):
        raise GraphError(f"the graph takes {len(parsed.inputs)} tensors, given are {len(inputs)}")
    builder = Builder(name)
    values: dict[FXReference, IRValue] = {}
    for k, info in enumerate(inputs):
        value = builder.input(f"i{k}", info.shape, info.dtype, strides=info.strides)
        values[FXReference(parsed.inputs[k])] = value
    for k, node in enumerate(parsed.nodes):
        made = _decode_node(builder, node, f"n{k}", values)
        values.update(zip(node.made, made, strict=True))
    return builder.finish([values[reference] for reference in parsed.outputs])


def _decode_node(
    builder: Builder, node: FXNode, name: str, values: Mapping[FXReference, IRValue]
) -> list[IRValue]:
    """Append the call; gives what it makes."""
    overload = resolve(node.op)
    _check_operator(overload, node)
    try:
        args = [_decode_argument(item, values) for item in node.args]
        kwargs = {key: _decode_argument(item, values) for key, item in node.kwargs.items()}
        check_written(overload, args, kwargs, _is_tensor)
    except GraphError as error:
        raise GraphError(f"{place_of(node)} {error}", node=node.name) from None
    tensors, attrs = split_call(overload, args, kwargs, is_tensor=_is_tensor)
    results = [
        None if item is None else builder.value(name, item.shape, item.dtype, strides=item.strides)
        for item in node.outputs
    ]
    builder.emit(node.op, tensors, attrs, outputs=results)
    return [value for value in results if value is not None]


def _is_tensor(item: Any) -> bool:
    return isinstance(item, IRValue)


def _decode_argument(data: Any, values: Mapping[FXReference, IRValue]) -> Any:
    if isinstance(data, FXReference):
        return values[data]
    if isinstance(data, list):
        return [_decode_argument(item, values) for item in data]
    value = from_json(data)
    if isinstance(value, Input):
        raise GraphError(f"{data!r} cannot stand in a text; write a reference to the tensor")
    return value


def _check_operator(overload: OpOverload, node: FXNode) -> None:
    """The operator opens no file, and returns as many things as the node says."""
    schema = schema_of(overload)
    where = place_of(node)
    if any(argument.name == "filename" for argument in schema.arguments):
        raise GraphError(
            f"{where}: operators that open files cannot stand in a pipeline", node=node.name
        )
    expected = signature(overload).returned
    if expected not in (None, len(node.outputs)):
        raise GraphError(
            f"{where} returns {expected} tensors, the text says {len(node.outputs)}", node=node.name
        )
