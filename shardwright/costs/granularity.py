"""Which nodes are measured together: units, by the modules that nodes stand in.

Input: a graph, how far down its tree of modules to go, and classes of modules that are one
piece. Output: units, in the order of the graph. Invariant: every node is in one unit;
the nodes of a unit stand next to one another, so that a unit can be run by itself; two calls of one
module are two units.

    depth=None  every node by itself
    depth=0     the whole graph
    depth=1     the modules that the model consists of; what it does between them, node by node
    depth=2     those that they consist of, and so on; a module without modules in it stays whole
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from shardwright.errors import ProfileError
from shardwright.ir import IRGraph, IRNode, Scope

BasicBlocks = type | str | Sequence[type | str]
"""Classes of modules, or their names: ``BertLayer``, or with their module in front."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Nodes that are run together.

    ``name`` is the module's path, or the name of what a single node makes; ``kind`` the module's
    class, or the operator.
    """

    name: str
    kind: str
    nodes: tuple[IRNode, ...]


def units(
    graph: IRGraph,
    nodes: Sequence[IRNode],
    *,
    depth: int | None = None,
    basic_blocks: BasicBlocks = (),
) -> list[Unit]:
    """The units that some of a graph's nodes, in its order, fall into.

    Raises ProfileError where no node is in a module of a class of ``basic_blocks``, or where depth
    is no number from 0 up.
    """
    _check_depth(depth)
    wanted = _classes(nodes, basic_blocks)
    if depth == 0:
        return [Unit(graph.name, "graph", tuple(nodes))] if nodes else []
    parents = {scope.path for node in nodes for scope in node.scopes[:-1]}

    def module(node: IRNode) -> Scope | None:
        return _module(node, depth, wanted, parents)

    found: list[Unit] = []
    for scope, run in groupby(nodes, module):
        if scope is None:
            found += [_single(graph, node) for node in run]
        else:
            calls = _calls(tuple(run))
            found += [Unit(scope.path, scope.cls.rpartition(".")[2], call) for call in calls]
    return found


def unit_graph(graph: IRGraph, unit: Unit) -> IRGraph:
    """The graph of a unit alone, with the ids of the whole graph.

    Its inputs are what it reads and nobody stores, in the order in which it reads them. Its outputs
    are what others read, or what the graph gives; all that its last node makes where that is
    nothing.
    """
    inside = {node.id for node in unit.nodes}
    read = dict.fromkeys(value_id for node in unit.nodes for value_id in node.inputs)
    made = dict.fromkeys(value_id for node in unit.nodes for value_id in node.outputs)
    values = {}
    for value_id in (*read, *made):
        value = graph.values[value_id]
        producer = value.producer if value_id in made else None
        users = [user for user in value.users if user in inside]
        values[value_id] = replace(value, producer=producer, users=users)
    given = {*graph.outputs, *graph.updates.values()}
    left = [v for v in made if v in given or not inside.issuperset(graph.values[v].users)]
    return IRGraph(
        unit.name,
        values,
        list(unit.nodes),
        inputs=[v for v in read if v not in made and not graph.values[v].is_stored],
        outputs=left or list(unit.nodes[-1].outputs),
        tensors=graph.tensors,
    )


def _check_depth(depth: int | None) -> None:
    if depth is not None and (type(depth) is not int or depth < 0):
        raise ProfileError(
            f"depth={depth!r}: how far down the tree of modules to go is a number from 0 up, or "
            "None for every node by itself"
        )


def _classes(nodes: Sequence[IRNode], basic_blocks: BasicBlocks) -> frozenset[str]:
    """The full names of the classes that are one piece, as scopes have them."""
    known = sorted({scope.cls for node in nodes for scope in node.scopes})
    found: set[str] = set()
    for block in _blocks(basic_blocks):
        name = block if isinstance(block, str) else f"{block.__module__}.{block.__qualname__}"
        matching = {cls for cls in known if cls == name or cls.endswith(f".{name}")}
        if not matching:
            raise ProfileError(
                f"basic_blocks: no node is in a module of class {name}; the graph has "
                f"{', '.join(known) or 'no modules'}"
            )
        found |= matching
    return frozenset(found)


def _blocks(basic_blocks: BasicBlocks) -> Sequence[type | str]:
    """The classes or names; one by itself is one of them. Raises ProfileError."""
    found: Any = basic_blocks
    one = isinstance(found, str | type) or not isinstance(found, Collection)
    blocks = [found] if one else list(found)
    for block in blocks:
        if not isinstance(block, str | type):
            raise ProfileError(
                f"basic_blocks are classes of modules, or their names, found {block!r}; give "
                "nn.Linear, or 'Linear', or several"
            )
    return blocks


def _module(
    node: IRNode, depth: int | None, wanted: frozenset[str], parents: set[str]
) -> Scope | None:
    """The module that is measured whole and holds the node, if there is one."""
    for level, scope in enumerate(node.scopes, start=1):
        if scope.cls in wanted or level == depth:
            return scope
    is_leaf = depth is not None and node.scopes and node.scope not in parents
    return node.scopes[-1] if is_leaf else None


def _single(graph: IRGraph, node: IRNode) -> Unit:
    return Unit(graph.values[node.outputs[0]].name if node.outputs else node.op, node.op, (node,))


def _calls(run: tuple[IRNode, ...]) -> Iterator[tuple[IRNode, ...]]:
    """A run of one module's nodes, apart where the module was called several times in a row.

    Calls are told from one another by that each does the same in the same lines.
    """
    lines = [(node.op, node.scopes, node.source) for node in run]
    sizes = (size for size in range(1, len(run) + 1) if len(run) % size == 0)
    size = next(size for size in sizes if lines[size:] == lines[:-size])
    if run[0].source is None:
        size = len(run)
    return (run[i : i + size] for i in range(0, len(run), size))
