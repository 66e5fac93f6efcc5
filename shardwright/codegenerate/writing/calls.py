"""Which modules of a stage are called, in what order, with which nodes; who updates buffers.

Each node is done once. A module is called where its nodes can stand together; where they cannot
(what it makes leaves it and comes back), or where two others would call it, its nodes are its
caller's, and it only holds parameters. A layer of torch.nn that is called several times is several
calls. A buffer that changes is changed by the innermost module that holds it, makes its new
contents, and has all that read the old ones. Data is made before it is read, operators that draw
random numbers or communicate keep their order, and all else stands as near to its place in the
graph as that allows.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

from shardwright.codegenerate.splitting.collectives import is_collective
from shardwright.codegenerate.writing.layers import TorchLayer, find_layer
from shardwright.codegenerate.writing.modules import Module, ModuleTree, is_under
from shardwright.ir import IRGraph, IRNode, Scope
from shardwright.ir.operators import is_random


@dataclass(eq=False, slots=True)
class ModuleCall:
    """A call of a module: the nodes it stands for; ``layer`` where it is one of torch.nn."""

    module: Module
    nodes: list[IRNode]
    layer: TorchLayer | None = None


Item = IRNode | ModuleCall
FindLayer = Callable[[Module, Sequence[IRNode]], TorchLayer | None]
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
    calls: dict[Module, list[ModuleCall]] = {}
    while True:
        items = _items(tree, module, nodes, dissolved, find_layer, calls)
        try:
            return _ordered(nodes, items)
        except CycleError as error:
            circle = (items[at] for at in error.args[1])
            calls_in_it = [item for item in circle if isinstance(item, ModuleCall)]
            dissolved |= _not_together(nodes, calls_in_it)


def _items(
    tree: ModuleTree,
    module: Module,
    nodes: Sequence[IRNode],
    dissolved: set[Module],
    find_layer: FindLayer,
    known: dict[Module, list[ModuleCall]],
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


def _calls(module: Module, nodes: list[IRNode], find_layer: FindLayer) -> list[ModuleCall]:
    """One call, or several of one layer."""
    layer = find_layer(module, nodes)
    if layer is not None or len(nodes) == 1:
        return [ModuleCall(module, nodes, layer)]
    single = [ModuleCall(module, [node], find_layer(module, [node])) for node in nodes]
    if all(_is_same_layer(single[0], call) for call in single):
        return single
    return [ModuleCall(module, nodes)]


def _is_same_layer(one: ModuleCall, other: ModuleCall) -> bool:
    """Whether both are calls of one layer of torch.nn."""
    if one.layer is None or other.layer is None:
        return False
    made = (one.layer.constructor, one.layer.parameters)
    return made == (other.layer.constructor, other.layer.parameters)


# --- order ----------------------------------------------------------------------------------------


def _ordered(nodes: Sequence[IRNode], items: Sequence[Item]) -> list[Item]:
    """The items in order. Raises CycleError where some wait for one another in a circle."""
    position = {node.id: at for at, node in enumerate(nodes)}
    group = {node.id: at for at, item in enumerate(items) for node in nodes_of(item)}
    first = [min(position[node.id] for node in nodes_of(item)) for item in items]
    sorter = TopologicalSorter[int](dict.fromkeys(range(len(items)), ()))
    for one, other in _dependencies(nodes):
        if group[one] != group[other]:
            sorter.add(group[other], group[one])
    sorter.prepare()
    ready: list[tuple[int, int]] = []
    ordered: list[Item] = []
    while sorter.is_active():
        for at in sorter.get_ready():
            heapq.heappush(ready, (first[at], at))
        _, at = heapq.heappop(ready)
        ordered.append(items[at])
        sorter.done(at)
    return ordered


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


def _not_together(nodes: Sequence[IRNode], calls: Sequence[ModuleCall]) -> set[Module]:
    """The modules whose calls make a circle: those that do so alone, or else the smallest."""
    after: dict[int, list[int]] = {}
    for one, other in _dependencies(nodes):
        after.setdefault(one, []).append(other)
    several = [call for call in calls if len(call.nodes) > 1]
    alone = {call.module for call in several if _comes_back(call, after)}
    return alone or {min(several, key=lambda call: len(call.nodes)).module}


def _comes_back(call: ModuleCall, after: dict[int, list[int]]) -> bool:
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
    return item.nodes if isinstance(item, ModuleCall) else [item]


@dataclass(eq=False)
class Calls:
    """What the modules of a stage do.

    items
        For each module with a forward of its own, what that does.
    by_module
        Each called module's call; one of them, where a layer is called several times.
    updates
        For each module with a forward the buffers that it changes in the end, with the new values.
    kept
        For each of these values the module that keeps it, a layer or one with a forward.
    """

    graph: IRGraph
    tree: ModuleTree
    items: dict[Module, list[Item]] = field(default_factory=dict)
    by_module: dict[Module, ModuleCall] = field(default_factory=dict)
    updates: dict[Module, dict[int, int]] = field(default_factory=dict)
    kept: dict[int, Module] = field(default_factory=dict)
    nodes: dict[Module, frozenset[int]] = field(default_factory=dict)

    @cached_property
    def written(self) -> set[int]:
        """Buffers that forwards change, those of layers left out."""
        return {old for updates in self.updates.values() for old in updates}

    def is_read_outside(self, module: Module, value_id: int) -> bool:
        """Whether anything outside the forward of ``module`` reads a value."""
        return not self.nodes[module].issuperset(self.graph.values[value_id].users)


def calls_of(graph: IRGraph, tree: ModuleTree, *, training: bool) -> Calls:
    """The calls of a stage of a model that is in training mode or not."""

    def find_layer(module: Module, nodes: Sequence[IRNode]) -> TorchLayer | None:
        return _layer(graph, module, nodes, training=training)

    shared: set[Module] = set()
    while True:
        calls = Calls(graph, tree)
        twice = _add(calls, find_layer, tree.root, graph.nodes, graph.updates, shared)
        if twice is None:
            return calls
        shared.add(twice)


def _add(
    calls: Calls,
    find_layer: FindLayer,
    module: Module,
    nodes: Sequence[IRNode],
    updates: Mapping[int, int],
    shared: set[Module],
) -> Module | None:
    """What ``module`` does with ``nodes``, and all inside it; a module that two others call."""
    items = arranged(calls.tree, module, nodes, find_layer, shared)
    calls.items[module] = items
    calls.nodes[module] = frozenset(node.id for node in nodes)
    left = dict(updates)
    for call in (item for item in items if isinstance(item, ModuleCall)):
        before = calls.by_module.get(call.module)
        if before is not None and not _is_same_layer(before, call):
            return call.module
        calls.by_module[call.module] = call
        own = {old: new for old, new in left.items() if _updates(calls, call, old, new)}
        left = {old: new for old, new in left.items() if old not in own}
        if call.layer is not None:
            calls.kept.update(dict.fromkeys(own.values(), call.module))
        else:
            twice = _add(calls, find_layer, call.module, call.nodes, own, shared)
            if twice is not None:
                return twice
    calls.updates[module] = left
    calls.kept.update(dict.fromkeys(left.values(), module))
    return None


def _updates(calls: Calls, call: ModuleCall, old: int, new: int) -> bool:
    """Whether the called module changes the buffer ``old`` to ``new`` itself."""
    own = {node.id for node in call.nodes}
    if calls.graph.values[new].producer not in own:
        return False
    if call.layer is not None:
        return old in call.layer.parameters.values()
    if not own.issuperset(calls.graph.values[old].users):
        return False
    path = call.module.path
    return any(
        home.module is call.module or is_under(home.module.path, path)
        for home in calls.tree.homes[old]
    )


# --- layers ---------------------------------------------------------------------------------------


def _layer(
    graph: IRGraph, module: Module, nodes: Sequence[IRNode], *, training: bool
) -> TorchLayer | None:
    """The layer of torch.nn that ``nodes`` are, if they are that and nothing else."""
    if any(map(is_collective, nodes)):
        return None
    if any(graph.values[v].placements for node in nodes for v in node.inputs):
        return None  # a layer has whole parameters
    scope = Scope(module.path, module.cls, module.arguments)
    layer = find_layer(graph, nodes, scope, training=training)
    return layer if layer is not None and _is_whole(graph, layer, module, nodes) else None


def _is_whole(graph: IRGraph, layer: TorchLayer, module: Module, nodes: Sequence[IRNode]) -> bool:
    """Whether the layer does all that the nodes do, and has a place for all that a module holds."""
    own = {node.id for node in nodes}
    stored = set(layer.parameters.values())
    read = {v for node in nodes for v in node.inputs if graph.values[v].is_stored}
    made = {v for node in nodes for v in node.outputs}
    needed = {v for v in made if v in graph.outputs or not own.issuperset(graph.values[v].users)}
    changed = {old for old, new in graph.updates.items() if new in made - {*layer.results}}
    held = {home for inner in module.inside() for home in _names_below(module, inner)}
    return (
        read <= stored | {*layer.arguments}
        and needed <= {*layer.results}
        and changed <= stored
        and held <= {*layer.parameters, "num_batches_tracked"}  # which no operator need read
    )


def _names_below(module: Module, inner: Module) -> Iterator[str]:
    """The names by which a module reaches the tensors of one inside it."""
    path = "".join(f"{m.name}." for m in module.down_to(inner))
    return (f"{path}{name}" for name in inner.tensors)
