"""The tree of modules that nodes stand in, and which of its items do the same.

Comes in: nodes that stand next to one another. Goes out: items, each a node or a `Module` with the
items in it. What always holds: the nodes of the items, one after another, are the nodes that came
in; a module that is left and called again is two modules.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from shardwright.ir.dropout import DROPOUT
from shardwright.ir.repeats import fingerprint
from shardwright.ir.values import IRNode, Scope

if TYPE_CHECKING:
    from shardwright.ir.graph import IRGraph


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    """Nodes that one module runs in a row.

    ``opens`` says whether a picture may show what is in it.
    """

    scope: Scope
    items: tuple[Item, ...]
    nodes: tuple[IRNode, ...]
    opens: bool = True


Item = IRNode | Module


def module_tree(nodes: Sequence[IRNode], level: int = 0) -> tuple[Item, ...]:
    """Items from nodes, whose outermost ``level`` modules are left out."""
    found: list[Item] = []
    for scope, run in groupby(nodes, lambda node: _at(node, level)):
        inside = tuple(run)
        if scope is None:
            found += inside
        else:
            found.append(Module(scope, module_tree(inside, level + 1), inside))
    return tuple(found)


def _at(node: IRNode, level: int) -> Scope | None:
    return node.scopes[level] if len(node.scopes) > level else None


def nodes_of(item: Item) -> tuple[IRNode, ...]:
    """The nodes of an item, in order."""
    return item.nodes if isinstance(item, Module) else (item,)


class Marks:
    """Numbers that two items have in common where they do the same, whatever their names.

    Modules do where they are of one class, and the operators in them, in modules of equal names,
    are the same and read one another alike. Which mask a dropout draws does not count.
    """

    def __init__(self, graph: IRGraph) -> None:
        self._graph = graph
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[int, int] = {}

    def of(self, item: Item) -> int:
        """The number of an item of the tree."""
        key = id(item)
        if key not in self._known:
            said = self._module(item) if isinstance(item, Module) else self._node(item)
            self._known[key] = self._numbers.setdefault(said, len(self._numbers))
        return self._known[key]

    def _node(self, node: IRNode) -> Hashable:
        if node.op == DROPOUT:
            node = replace(node, attrs={**node.attrs, "seed": 0, "site": 0})
        return fingerprint(self._graph, node)

    def _module(self, module: Module) -> Hashable:
        inside = tuple((_name_in(module, item), self.of(item)) for item in module.items)
        return module.scope.cls, inside, self._wiring(module)

    def _wiring(self, module: Module) -> tuple[tuple[int, ...], ...]:
        """Of each input which value made before in the module it is; -1 where it is none."""
        places: dict[int, int] = {}
        found = []
        for node in module.nodes:
            found.append(tuple(places.get(value_id, -1) for value_id in node.inputs))
            for value_id in node.outputs:
                places[value_id] = len(places)
        return tuple(found)


def _name_in(module: Module, item: Item) -> str:
    """The name of an item within a module."""
    return item.scope.path.removeprefix(module.scope.path) if isinstance(item, Module) else ""
