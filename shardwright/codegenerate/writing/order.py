"""In which order a module's forward does its work: operators of its own, and calls of modules.

Comes in: the nodes inside one module of a stage. Goes out: the same as a sequence of nodes and
`Call`s. What always holds: data is made before it is read, operators that draw random numbers or
communicate keep their order, and everything else stands as near to its place in the graph as that
allows.

A module is called where its nodes can stand together. Where they cannot (what it makes leaves it
and comes back) its nodes are its caller's, and it only holds parameters. A layer of torch.nn that
is called several times is several calls.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from shardwright.codegenerate.splitting.collectives import is_collective
from shardwright.codegenerate.writing.layers import Layer
from shardwright.codegenerate.writing.modules import Module, ModuleTree
from shardwright.ir import IRNode
from shardwright.ir.operators import is_random


@dataclass(eq=False, slots=True)
class Call:
    """A call of a module: the nodes it stands for; ``layer`` where it is one of torch.nn."""

    module: Module
    nodes: list[IRNode]
    layer: Layer | None = None


Item = IRNode | Call
FindLayer = Callable[[Module, Sequence[IRNode]], Layer | None]
"""The layer that some nodes of a module are, all of them and nothing else."""


def arranged(
    tree: ModuleTree,
    module: Module,
    nodes: Sequence[IRNode],
    find_layer: FindLayer,
    shared: Collection[Module] = (),
) -> list[Item]:
    """What the forward of ``module`` does, in order.

    ``nodes`` are those inside it; modules in ``shared`` have several callers, so none.
    """
    dissolved = set(shared)
    calls: dict[Module, list[Call]] = {}
    while True:
        items = _items(tree, module, nodes, dissolved, find_layer, calls)
        ordered, stuck = _ordered(nodes, items)
        if not stuck:
            return ordered
        dissolved |= _not_together(nodes, [item for item in stuck if isinstance(item, Call)])


def _items(
    tree: ModuleTree,
    module: Module,
    nodes: Sequence[IRNode],
    dissolved: set[Module],
    find_layer: FindLayer,
    known: dict[Module, list[Call]],
) -> list[Item]:
    """Own nodes as they are, those of inner modules as calls; without an order."""
    items: list[Item] = []
    inner: dict[Module, list[IRNode]] = {}
    for node in nodes:
        chain = tree.chains[node.id]
        depth = chain.index(module) + 1 if module in chain else 0
        child = next((m for m in chain[depth:] if m not in dissolved), None)
        if child is None:
            items.append(node)
        else:
            inner.setdefault(child, []).append(node)
    for child, own in inner.items():
        if child not in known:
            known[child] = _calls(child, own, find_layer)
        items += known[child]
    return items


def _calls(module: Module, nodes: list[IRNode], find_layer: FindLayer) -> list[Call]:
    """One call, or several of one layer."""
    layer = find_layer(module, nodes)
    if layer is not None or len(nodes) == 1:
        return [Call(module, nodes, layer)]
    single = [Call(module, [node], find_layer(module, [node])) for node in nodes]
    first = single[0].layer
    if first is not None and all(_same_layer(first, call.layer) for call in single):
        return single
    return [Call(module, nodes)]


def _same_layer(one: Layer, other: Layer | None) -> bool:
    if other is None or one.constructor != other.constructor:
        return False
    return dict(one.parameters) == dict(other.parameters)


# --- order ----------------------------------------------------------------------------------------


def _ordered(nodes: Sequence[IRNode], items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """The items in order, and those that wait for one another in a circle."""
    position = {node.id: at for at, node in enumerate(nodes)}
    group = {node.id: at for at, item in enumerate(items) for node in nodes_of(item)}
    first = [min(position[node.id] for node in nodes_of(item)) for item in items]
    after: list[set[int]] = [set() for _ in items]
    for one, other in _dependencies(nodes):
        if group[one] != group[other]:
            after[group[one]].add(group[other])
    waits = [0] * len(items)
    for readers in after:
        for reader in readers:
            waits[reader] += 1
    ready = [(first[at], at) for at, count in enumerate(waits) if not count]
    heapq.heapify(ready)
    ordered: list[Item] = []
    while ready:
        _, at = heapq.heappop(ready)
        ordered.append(items[at])
        for reader in after[at]:
            waits[reader] -= 1
            if not waits[reader]:
                heapq.heappush(ready, (first[reader], reader))
    return ordered, [items[at] for at in _in_circles(after, waits)]


def _in_circles(after: Sequence[set[int]], waits: Sequence[int]) -> list[int]:
    """Of the items that still wait, those that others that wait need."""
    left = {at for at, count in enumerate(waits) if count}
    while True:
        last = {at for at in left if not after[at] & left}
        if not last:
            return sorted(left)
        left -= last


def _dependencies(nodes: Sequence[IRNode]) -> Iterable[tuple[int, int]]:
    """Pairs of nodes of which the second comes after the first."""
    maker: dict[int, int] = {}
    kept: int | None = None
    for node in nodes:
        for value_id in node.inputs:
            if value_id in maker:
                yield maker[value_id], node.id
        if keeps_its_place(node):
            if kept is not None:
                yield kept, node.id
            kept = node.id
        maker.update(dict.fromkeys(node.outputs, node.id))


def _not_together(nodes: Sequence[IRNode], calls: Sequence[Call]) -> set[Module]:
    """The modules whose calls make a circle: those that do so alone, or else the smallest."""
    after: dict[int, list[int]] = {}
    for one, other in _dependencies(nodes):
        after.setdefault(one, []).append(other)
    several = [call for call in calls if len(call.nodes) > 1]
    alone = {call.module for call in several if _comes_back(call, after)}
    return alone or {min(several, key=lambda call: len(call.nodes)).module}


def _comes_back(call: Call, after: dict[int, list[int]]) -> bool:
    """Whether what a call makes leaves it and comes back."""
    own = {node.id for node in call.nodes}
    open_ = [user for node in own for user in after.get(node, ()) if user not in own]
    seen = set(open_)
    while open_:
        for user in after.get(open_.pop(), ()):
            if user in own:
                return True
            if user not in seen:
                seen.add(user)
                open_.append(user)
    return False


def keeps_its_place(node: IRNode) -> bool:
    """Whether a node comes before or after others of its kind: it draws, or communicates."""
    return is_collective(node) or is_random(node)


def nodes_of(item: Item) -> list[IRNode]:
    """The nodes that an item stands for."""
    return item.nodes if isinstance(item, Call) else [item]
