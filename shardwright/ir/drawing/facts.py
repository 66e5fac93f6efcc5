"""What a picture says of some nodes taken together.

Comes in: nodes of a graph, and milliseconds by node id. Goes out: types, bytes and times. What
always holds: what two boxes take together is the sum of what each takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from shardwright.ir.quantities import tensor_text
from shardwright.ir.values import IRNode, IRValue

if TYPE_CHECKING:
    from shardwright.ir.graph import IRGraph


NAMED = 6
"""Kinds of operators that a tip counts, the most frequent first."""


def operator_text(node: IRNode) -> str:
    """An operator without its namespace and overload: ``linear``."""
    return node.op.split(".")[1] if "." in node.op else node.op


def type_text(value: IRValue) -> str:
    """``f32[8, 128]``."""
    return tensor_text(value.dtype, value.shape)


def given_types(graph: IRGraph, nodes: Sequence[IRNode]) -> tuple[str, ...]:
    """The types of what nodes make for others, each once; of the last node's where that is none."""
    inside = {node.id for node in nodes}
    results = {*graph.outputs, *graph.updates.values()}

    def leaves(value_id: int) -> bool:
        return value_id in results or not inside.issuperset(graph.values[value_id].users)

    made = [value_id for node in nodes for value_id in node.outputs]
    left = [value_id for value_id in made if leaves(value_id)] or nodes[-1].outputs
    return tuple(dict.fromkeys(type_text(graph.values[value_id]) for value_id in left))


def stored_bytes(graph: IRGraph, nodes: Sequence[IRNode]) -> int:
    """Bytes of the distinct stored values that nodes read."""
    read = {value_id for node in nodes for value_id in node.inputs}
    return sum(graph.values[v].nbytes for v in read if graph.values[v].is_stored)


def total_time(times: Mapping[int, float], nodes: Sequence[IRNode]) -> float | None:
    """Milliseconds of nodes; None where no time is known of any."""
    known = [times[node.id] for node in nodes if node.id in times]
    return sum(known) if known else None


def tip_text(graph: IRGraph, nodes: Sequence[IRNode]) -> str:
    """Names of what nodes make, their operators, and the source line of the first."""
    first = nodes[0]
    if len(nodes) == 1:
        made = ", ".join(
            f"{graph.values[v].name} {type_text(graph.values[v])}" for v in first.outputs
        )
        lines = [*(scope.path for scope in first.scopes[-1:]), f"{first.op} → {made}"]
    else:
        counts = Counter(operator_text(node) for node in nodes).most_common()
        shown = ", ".join(f"{name} ×{count}" for name, count in counts[:NAMED])
        lines = [f"{len(nodes)} operators: {shown}{', …' if len(counts) > NAMED else ''}"]
    if first.source is not None:
        lines.append(f"{PurePath(first.source.file).name}:{first.source.line}")
    return "\n".join(lines)
