"""The same names for the same tensors in two graphs of one program.

A graph names its tensors as the function that it was captured from reaches them: ``0.weight`` in
one that closes over a model alone is ``generator.0.weight`` in one that closes over two. Programs
that share state find it by name, so what is one tensor gets one name here, and what merely has the
name of another tensor, as constants that are lifted out of code do, a name of its own.
"""

from __future__ import annotations

from shardwright.ir import IRGraph


def share_names(graph: IRGraph, trained: IRGraph) -> IRGraph:
    """``graph``, its stored values named as in ``trained`` where they are the same tensors.

    States without a tensor yet, as an optimizer's before its first step, keep their names.
    """
    known = {id(tensor): trained.values[value].names for value, tensor in trained.tensors.items()}
    taken = {name for value in (*trained.stored(), *graph.stored()) for name in value.names}
    theirs = {name for value in trained.stored() for name in value.names}
    for value in graph.stored():
        tensor = graph.tensors.get(value.id)
        if tensor is None:
            continue
        if id(tensor) in known:
            value.names = known[id(tensor)]
        elif not theirs.isdisjoint(value.names):
            value.names = tuple(_free(name, taken) for name in value.names)
    return graph


def _free(name: str, taken: set[str]) -> str:
    number = 1
    while f"{name}__{number}" in taken:
        number += 1
    taken.add(f"{name}__{number}")
    return f"{name}__{number}"
