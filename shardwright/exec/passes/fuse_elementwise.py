"""Chains of elementwise operators, each as one `shardwright::chain`.

Comes in: a graph. Goes out: the same, in which elementwise operators that feed one another, of one
shape and layout, are one node; values that others read too are further outputs of it. An addition,
a ReLU, its gradient or a cast that stands alone stays what it is: they are kinds of their own.

What always holds. Every step rounds as it did: an inner value is f32 where the chain computes in
f32 and f64 where in f64, so that operators of halves end a chain, and integers only enter one where
they become floats or are compared with a small number. No cycle arises: nodes are together only if
they have one level, which rises along every edge that does not fuse; a node that one other alone
reads may join it higher up. A chain has at most `LONGEST` instructions and `WIDEST` operands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shardwright.exec.chains import Chain, Instruction, Load, Operand, Result, check_chain
from shardwright.exec.elementwise import result_strides, strides_of
from shardwright.exec.operators import CHAIN
from shardwright.exec.passes.elementwise import BITWISE, ROWS, Writer
from shardwright.exec.passes.order import Unit, units
from shardwright.exec.passes.rewriter import Rewriter, arguments
from shardwright.ir import IRGraph, IRNode, IRValue
from shardwright.ir.values import Input

LONGEST = 30
WIDEST = 16
LARGEST_EXACT = 2**24
"""Up to here every whole number is a float of 32 bits."""

_CAST = "aten._to_copy.default"
_ALONE = frozenset(
    {"aten.relu.default", "aten.threshold_backward.default", _CAST, "aten.add.Tensor"}
)
"""What stays as it is where nothing fuses with it; an addition only if it is of two tensors."""
_HALVES = frozenset({"f16", "bf16"})
_FLOATS = frozenset({"f64", "f32"}) | _HALVES
_INTEGERS = frozenset({"i64", "i32", "i16", "i8", "u8"})
_COMPARISONS = frozenset({"gt", "ge", "lt", "le", "eq", "ne"})
_LOGIC = frozenset({"logical_not", "logical_and", "logical_or", "isnan"})


class Family(NamedTuple):
    """What nodes must have alike to fuse: in what they compute, and how their results lie."""

    wide: str
    shape: tuple[int, ...]
    strides: tuple[tuple[int, int], ...]


def fuse_elementwise(graph: IRGraph) -> IRGraph:
    """The graph with chains."""
    families = {node.id: f for node in graph.nodes if (f := family(graph, node)) is not None}
    found = [part for group in _groups(graph, families) for part in _parts(graph, group)]
    chains = {}
    for group in found:
        if _is_worth_it(group) and (written := _written(graph, group)) is not None:
            chains[group[0].id] = written
    if not chains:
        return graph
    rewriter = Rewriter(graph)
    for unit in units(graph, [group for group in found if group[0].id in chains]):
        if (written := chains.get(unit[0].id)) is not None:
            _emit(rewriter, unit, written)
        else:
            rewriter.keep(unit[0])
    return rewriter.finish(prune=True)


# --- what can be an instruction --------------------------------------------------------------


def family(graph: IRGraph, node: IRNode) -> Family | None:
    """With what a node may fuse, None where it is not elementwise or its rounding would change."""
    if node.op not in ROWS and node.op not in BITWISE:
        return None
    made = graph.values[node.outputs[0]]
    dtypes = [graph.values[value_id].dtype for value_id in node.inputs]
    wide = _wide(node, made.dtype, dtypes)
    if wide is None or made.numel == 0 or _length(node) is None:
        return None
    strides = strides_of(made.shape, made.strides)
    sized = tuple((d, strides[d]) for d, size in enumerate(made.shape) if size > 1)
    return Family(wide, made.shape, sized)


def _wide(node: IRNode, made: str, dtypes: Sequence[str]) -> str | None:
    """In what the node computes; None where a chain would round in another way."""
    if node.op == _CAST:
        return _wide_of_cast(node, made, dtypes[0])
    if node.op in BITWISE:
        return "f32" if {made, *dtypes} == {"bool"} else None
    floats = _FLOATS.intersection(dtypes)
    integers = _INTEGERS.intersection(dtypes)
    if len(floats) + len(integers) + ("bool" in dtypes) < len(set(dtypes)):
        return None
    name = node.op.split(".")[1]
    if name in _COMPARISONS or name in _LOGIC:
        one_width = floats <= {"f64"} or "f64" not in floats
        exact = not integers or (name in _COMPARISONS and _compares_small_number(node))
        wide = "f64" if "f64" in floats else "f32"
        return wide if made == "bool" and one_width and exact else None
    if made in _HALVES:
        return "f32" if floats == {made} and not integers else None
    if made == "f32":
        return "f32" if "f64" not in floats else None
    return "f64" if made == "f64" else None


def _wide_of_cast(node: IRNode, made: str, given: str) -> str | None:
    attrs = node.attrs
    plain = attrs["memory_format"] in (None, torch.preserve_format) and not attrs["pin_memory"]
    if not plain or attrs["layout"] not in (None, torch.strided):
        return None
    if given in _INTEGERS and made not in ("f32", "f64", "bool"):
        return None
    if not {given, made} <= _FLOATS | _INTEGERS | {"bool"} or made in _INTEGERS:
        return None
    return "f64" if "f64" in (given, made) else "f32"


def _compares_small_number(node: IRNode) -> bool:
    """Whether integers are compared with a number, so that they may be rounded to floats before."""
    other = node.attrs.get("other")
    return isinstance(other, (bool, int)) and abs(other) <= LARGEST_EXACT


_lengths: dict[tuple[str, str], int | None] = {}


def _length(node: IRNode) -> int | None:
    """How many instructions the operator is with these attributes; None where it cannot be any."""
    key = (node.op, repr(node.attrs))
    if key not in _lengths:
        writer = Writer(Load)
        try:
            made = _instructions(writer, node)
        except (TypeError, ValueError):  # a number that is no float
            made = None
        _lengths[key] = None if made is None else len(writer.instructions)
    return _lengths[key]


def _instructions(writer: Writer, node: IRNode) -> Operand | None:
    """Append what computes the node's result."""
    given = arguments(node)
    if node.op in BITWISE:
        names = ("self", "other") if "other" in given else ("self",)
        return writer(BITWISE[node.op], *(given[name] for name in names))
    return ROWS[node.op](writer, given)


# --- what goes together ----------------------------------------------------------------------


def _groups(graph: IRGraph, families: Mapping[int, Family]) -> list[list[IRNode]]:
    """Nodes that fuse, each group in the graph's order; single ones too."""
    levels = _levels(graph, families)
    root: dict[int, int] = {}

    def find(node_id: int) -> int:
        while root[node_id] != node_id:
            root[node_id] = root[root[node_id]]
            node_id = root[node_id]
        return node_id

    groups: dict[int, list[IRNode]] = {}
    for node in graph.nodes:
        if node.id not in families:
            continue
        root[node.id] = node.id
        for value_id in node.inputs:
            producer = _fuses(graph, families, value_id, node.id)
            if producer is not None and levels[producer] == levels[node.id]:
                root[find(producer)] = node.id
    for node in graph.nodes:
        if node.id in families:
            groups.setdefault(find(node.id), []).append(node)
    return list(groups.values())


def _levels(graph: IRGraph, families: Mapping[int, Family]) -> dict[int, int]:
    """A number for each node that rises along every edge that does not fuse."""
    levels: dict[int, int] = {}
    for node in graph.nodes:
        level = 0
        for value_id in node.inputs:
            producer = graph.values[value_id].producer
            if producer is not None:
                together = _fuses(graph, families, value_id, node.id) is not None
                level = max(level, levels[producer] + (0 if together else 1))
        levels[node.id] = level
    kept = {*graph.outputs, *graph.updates.values()}
    for node in reversed(graph.nodes):
        if node.id in families and (user := _only_user(graph, families, node, kept)) is not None:
            levels[node.id] = levels[user]
    return levels


def _fuses(graph: IRGraph, families: Mapping[int, Family], value_id: int, user: int) -> int | None:
    """The node that makes a value, where it and the user may be one chain."""
    value = graph.values[value_id]
    if value.producer is None or user not in families:
        return None
    maker = families.get(value.producer)
    fits = maker is not None and maker == families[user] and value.dtype in (maker.wide, "bool")
    return value.producer if fits else None


def _only_user(
    graph: IRGraph, families: Mapping[int, Family], node: IRNode, kept: set[int]
) -> int | None:
    """The one node that reads a result, where they fuse and waiting for it keeps no more alive."""
    made = graph.values[node.outputs[0]]
    if len(made.users) != 1 or made.id in kept:
        return None
    (user,) = made.users
    held = [v for v in map(graph.values.__getitem__, set(node.inputs)) if v.role == "tmp"]
    if sum(value.nbytes for value in held) > made.nbytes:
        return None
    return user if _fuses(graph, families, made.id, user) is not None else None


def _parts(graph: IRGraph, group: list[IRNode]) -> list[list[IRNode]]:
    """A group, or pieces of it one after another that are not too long or wide."""
    pieces: list[list[IRNode]] = [[]]
    for node in group:
        if pieces[-1] and not _fits(graph, [*pieces[-1], node]):
            pieces.append([])
        pieces[-1].append(node)
    return pieces


def _fits(graph: IRGraph, nodes: Sequence[IRNode]) -> bool:
    if sum(_length(node) or 0 for node in nodes) > LONGEST:
        return False
    ends = _ends(graph, nodes)
    return len(ends.inputs) + len(ends.outputs) <= WIDEST


def _is_worth_it(group: Sequence[IRNode]) -> bool:
    """Whether a chain is better than the nodes as they are."""
    (first, *others) = group
    if others or first.op not in _ALONE:
        return True
    return first.op == "aten.add.Tensor" and len(first.inputs) == 1


# --- writing ---------------------------------------------------------------------------------


class _Ends(NamedTuple):
    """What a group reads of others and what others read of it, by value id."""

    inputs: list[int]
    outputs: list[int]


@dataclass(frozen=True, slots=True)
class _Written:
    inputs: list[int]
    outputs: list[IRValue]
    chain: Chain


def _ends(graph: IRGraph, nodes: Sequence[IRNode]) -> _Ends:
    inside = {node.id for node in nodes}
    made = {node.outputs[0]: node for node in nodes}
    read = [value_id for node in nodes for value_id in node.inputs if value_id not in made]
    last = {*graph.updates.values()}
    outputs = [
        value_id
        for value_id in made
        if value_id in last
        or graph.values[value_id].role == "output"
        or not inside.issuperset(graph.values[value_id].users)
        or not graph.values[value_id].users
    ]
    return _Ends(list(dict.fromkeys(read)), outputs)


def _written(graph: IRGraph, nodes: Sequence[IRNode]) -> _Written | None:
    """The chain of a group, None where its results would lie in another way or round so."""
    ends = _ends(graph, nodes)
    operands: dict[int, Operand] = {value_id: Load(i) for i, value_id in enumerate(ends.inputs)}
    writer = Writer(operands.__getitem__)
    for node in nodes:
        operands[node.outputs[0]] = _result(graph, writer, operands, node)
    found = [operands[value_id] for value_id in ends.outputs]
    numbers = [_number(writer, operand) for operand in found]
    chain = Chain(tuple(writer.instructions), tuple(numbers))
    check_chain(chain)
    outputs = [graph.values[value_id] for value_id in ends.outputs]
    inputs = [graph.values[value_id] for value_id in ends.inputs]
    if not _lies_as_before(inputs, outputs[0]) or not _computes_in_f64(
        nodes, graph, inputs, outputs
    ):
        return None
    return _Written(ends.inputs, outputs, chain)


def _result(
    graph: IRGraph, writer: Writer, operands: Mapping[int, Operand], node: IRNode
) -> Operand:
    """What a node computes; a cast to another float is what it casts."""
    made = graph.values[node.outputs[0]]
    if node.op == _CAST and made.dtype != "bool":
        return operands[node.inputs[0]]
    result = _instructions(writer, node)
    assert result is not None
    return result


def _number(writer: Writer, operand: Operand) -> int:
    """The instruction whose result an output is; one that leaves an input as it is, if need be."""
    if not isinstance(operand, Result):
        writer.instructions.append(Instruction("mul", (operand, 1.0)))
        return len(writer.instructions) - 1
    return operand.index


def _lies_as_before(inputs: Sequence[IRValue], output: IRValue) -> bool:
    """Whether the chain's results have the strides that the nodes' had."""
    given = [(v.shape, strides_of(v.shape, v.strides)) for v in inputs]
    found = result_strides(output.shape, given)
    before = strides_of(output.shape, output.strides)
    return all(a == b for a, b, n in zip(found, before, output.shape, strict=True) if n > 1)


def _computes_in_f64(
    nodes: Sequence[IRNode], graph: IRGraph, inputs: Sequence[IRValue], outputs: Sequence[IRValue]
) -> bool:
    """Whether a chain with an inner f64 has an operand of f64, which makes it compute so."""
    inner = {graph.values[node.outputs[0]].dtype for node in nodes}
    return "f64" not in inner or any(value.dtype == "f64" for value in (*inputs, *outputs))


def _emit(rewriter: Rewriter, unit: Unit, written: _Written) -> None:
    attrs: dict[str, Any] = {
        "inputs": [Input(i) for i in range(len(written.inputs))],
        "program": str(written.chain),
        "dtypes": " ".join(value.dtype for value in written.outputs),
    }
    inputs = [rewriter.now(value_id) for value_id in written.inputs]
    rewriter.emit(CHAIN, inputs, written.outputs, attrs, unit[-1])
