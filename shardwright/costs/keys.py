"""When two calls, or two units, are the same for who measures them.

A key is made of all that decides how long a call takes, and of nothing else: the operator, its
attributes, shapes, dtypes, strides, which inputs want gradients, and how calls are wired. Names and
contents do not count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from shardwright.ir import IRGraph, IRNode, IRValue


def call_key(graph: IRGraph, node: IRNode, wanted: Collection[int]) -> str:
    """The key of one call: ``aten.linear.default:<digest>:ms-``.

    The digest is of the call alone. The letters say of each input whether it wants a gradient, as
    a value that a node made or as a stored one.
    """
    first = {value_id: i for i, value_id in reversed(list(enumerate(node.inputs)))}
    inputs = [(first[value_id], _kind(graph.values[value_id])) for value_id in node.inputs]
    outputs = [_kind(graph.values[value_id]) for value_id in node.outputs]
    digest = _digest((inputs, outputs, repr(node.attrs), node.absent))
    letters = "".join(_want(graph.values[value_id], wanted) for value_id in node.inputs)
    return f"{node.op}:{digest}:{letters}"


def forward_key(key: str) -> str:
    """What of a call's key its forward depends on."""
    return key.rpartition(":")[0]


def wants_gradients(key: str) -> bool:
    """Whether an input of the call wants a gradient."""
    return bool(key.rpartition(":")[2].strip("-"))


def unit_key(graph: IRGraph, wanted: Collection[int]) -> str:
    """The key of a unit's graph: a digest of its calls' keys and of how they are wired."""
    places: dict[int, int] = {}
    for node in graph.nodes:
        for value_id in (*node.inputs, *node.outputs):
            places.setdefault(value_id, len(places))
    calls = [
        (call_key(graph, node, wanted), [places[v] for v in (*node.inputs, *node.outputs)])
        for node in graph.nodes
    ]
    return _digest((calls, [places[value_id] for value_id in graph.outputs]))


def _kind(value: IRValue) -> object:
    return value.shape, value.dtype, value.strides


def _want(value: IRValue, wanted: Collection[int]) -> str:
    if value.id not in wanted:
        return "-"
    return "s" if value.is_stored else "m"


def _digest(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:24]
