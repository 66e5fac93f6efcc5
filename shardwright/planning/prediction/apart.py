"""What gradients of parameters are made of, where they are made apart from other gradients.

Comes in: a forward. Goes out: rows of values and nodes. Between a backward and its weight gradients
(zero bubble) a slot holds these: what nodes read that the gradients of their parameters are made
of, and the gradients of what they make. What always holds: values with the same gradient have the
same number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from shardwright.costs.operations import FREE
from shardwright.costs.saved import saved_for_stored
from shardwright.ir import IRGraph

PASSING = FREE | {"aten.add.Tensor"}
"""Operators whose gradients are those of what they make, seen otherwise."""


def read_apart(
    view: IRGraph, trained: Collection[int], needing: Collection[int], bases: Mapping[int, int]
) -> Iterator[tuple[int, int, int, int]]:
    """Rows: a number for what is held, the position of the node, the value there, whole bytes."""
    readers = {node.id: i for i, node in enumerate(view.nodes)}
    beyond = max(view.values, default=0) + 1
    for i, node in enumerate(view.nodes):
        read = saved_for_stored(view, node, trained, bases)
        if read is None:
            continue
        for value_id in read:
            base = view.values[bases.get(value_id, value_id)]
            if not base.is_stored:
                yield base.id, i, value_id, base.nbytes
        for value_id in node.outputs:
            if value_id in needing:
                number = beyond + _passed_on(view, readers, value_id)
                yield number, i, value_id, view.values[value_id].nbytes


def _passed_on(view: IRGraph, readers: Mapping[int, int], value_id: int) -> int:
    """The last value that has this one's gradient."""
    while True:
        users = dict.fromkeys(view.values[value_id].users)
        reader = view.nodes[readers[next(iter(users))]] if len(users) == 1 else None
        if reader is None or reader.op not in PASSING or len(reader.outputs) != 1:
            return value_id
        if view.values[reader.outputs[0]].nbytes != view.values[value_id].nbytes:
            return value_id
        value_id = reader.outputs[0]
