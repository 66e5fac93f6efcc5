"""Which modules of a stage are called, by whom and with which nodes, and who updates buffers.

Comes in: a stage's graph and its tree of modules. Goes out: for each module with a forward what
that does, in order. What always holds: each node is done once; a module with a forward has one
caller, or is one layer of torch.nn; each buffer that changes is changed by the innermost module
that holds it, makes its new contents, and has all that read the old ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from shardwright.codegenerate.splitting.collectives import is_collective
from shardwright.codegenerate.writing.layers import Layer, find_layer
from shardwright.codegenerate.writing.modules import Module, ModuleTree, is_under
from shardwright.codegenerate.writing.order import Call, Item, arranged
from shardwright.ir import IRGraph, IRNode, Scope
from shardwright.ir.aliasing import memory_roots


@dataclass(eq=False)
class Calls:
    """What the modules of a stage do.

    items
        For each module with a forward of its own, what that does.
    by_module
        Each called module's call; one of them, where a layer is called several times.
    updates
        For each module with a forward the buffers that it changes in the end, with the new values.
    """

    graph: IRGraph
    tree: ModuleTree
    items: dict[Module, list[Item]] = field(default_factory=dict)
    by_module: dict[Module, Call] = field(default_factory=dict)
    updates: dict[Module, dict[int, int]] = field(default_factory=dict)
    nodes: dict[Module, frozenset[int]] = field(default_factory=dict)

    @cached_property
    def written(self) -> set[int]:
        """Buffers that forwards change, those of layers left out."""
        return {old for updates in self.updates.values() for old in updates}

    @cached_property
    def outliving(self) -> frozenset[int]:
        """Buffers whose old contents are seen, as they are or in views, after they change."""
        roots = memory_roots(self.graph) if self.graph.updates else {}
        views: dict[int, list[int]] = {}
        for value_id, below in roots.items():
            for old in below & self.graph.updates.keys():
                views.setdefault(old, []).append(value_id)
        left = {*self.graph.outputs, *self.graph.updates.values()}
        return frozenset(
            old
            for module, updates in self.updates.items()
            for old in updates
            for view in views[old]
            if view in left or self.is_read_outside(module, view)
        )

    def is_read_outside(self, module: Module, value_id: int) -> bool:
        """Whether anything outside the forward of ``module`` reads a value."""
        return not self.nodes[module].issuperset(self.graph.values[value_id].users)


def calls_of(graph: IRGraph, tree: ModuleTree, *, training: bool) -> Calls:
    """The calls of a stage of a model that is in training mode or not."""
    layers = _Layers(graph, tree, training=training)
    shared: set[Module] = set()
    while True:
        calls = Calls(graph, tree)
        twice = _add(calls, layers, tree.root, graph.nodes, graph.updates, shared)
        if twice is None:
            return calls
        shared.add(twice)


def _add(
    calls: Calls,
    layers: _Layers,
    module: Module,
    nodes: Sequence[IRNode],
    updates: Mapping[int, int],
    shared: set[Module],
) -> Module | None:
    """What ``module`` does with ``nodes``, and all inside it; a module that two others call."""
    items = arranged(calls.tree, module, nodes, layers.find, shared)
    calls.items[module] = items
    calls.nodes[module] = frozenset(node.id for node in nodes)
    left = dict(updates)
    for call in (item for item in items if isinstance(item, Call)):
        before = calls.by_module.get(call.module)
        if before is not None and not _is_again(before, call):
            return call.module
        calls.by_module[call.module] = call
        own = {old: new for old, new in left.items() if _updates(calls, call, old, new)}
        left = {old: new for old, new in left.items() if old not in own}
        if call.layer is None:
            twice = _add(calls, layers, call.module, call.nodes, own, shared)
            if twice is not None:
                return twice
    calls.updates[module] = left
    return None


def _is_again(before: Call, call: Call) -> bool:
    """Whether a call is another one of the same layer."""
    one, other = before.layer, call.layer
    return one is not None and other is not None and one.constructor == other.constructor


def _updates(calls: Calls, call: Call, old: int, new: int) -> bool:
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


class _Layers:
    """Finds layers of torch.nn among the modules of a stage."""

    def __init__(self, graph: IRGraph, tree: ModuleTree, *, training: bool) -> None:
        self.graph = graph
        self.training = training
        self.tree = tree
        self.names = {value_id: homes[0].path for value_id, homes in tree.homes.items()}
        self.tied = {value_id: homes for value_id, homes in tree.homes.items() if homes[1:]}
        self.outputs = {*graph.outputs}
        self.changed = {new: old for old, new in graph.updates.items()}

    def find(self, module: Module, nodes: Sequence[IRNode]) -> Layer | None:
        """The layer that ``nodes`` are, if they are that and nothing else."""
        if any(map(is_collective, nodes)):
            return None
        if any(self.graph.values[v].placements for node in nodes for v in node.inputs):
            return None  # a layer has whole parameters
        scope = Scope(module.path, module.cls)
        names = self._names(module)
        layer = find_layer(self.graph, nodes, scope, names, training=self.training)
        return layer if layer is not None and self._is_whole(layer, module, nodes) else None

    def _names(self, module: Module) -> dict[int, str]:
        """Each stored value's path: that under ``module`` where it has one there."""
        found = dict(self.names)
        for value_id, homes in self.tied.items():
            under = [home for home in homes if module in home.module.upwards()]
            found[value_id] = (under or homes)[0].path
        return found

    def _is_whole(self, layer: Layer, module: Module, nodes: Sequence[IRNode]) -> bool:
        own = {node.id for node in nodes}
        stored = set(layer.parameters.values())
        read = {v for node in nodes for v in node.inputs if self.graph.values[v].is_stored}
        made = {v for node in nodes for v in node.outputs}
        needed = {v for v in made if v in self.outputs or not own.issuperset(self._users(v))}
        changed = {v for v in made if v in self.changed and v not in layer.results}
        return (
            read <= stored | set(layer.arguments)
            and needed <= set(layer.results)
            and all(self.changed[value_id] in stored for value_id in changed)
            and _holds_all(layer, module)
        )

    def _users(self, value_id: int) -> Iterable[int]:
        return self.graph.values[value_id].users


_COUNTERS = ("num_batches_tracked",)
"""Buffers of layers that no operator of theirs may read."""


def _holds_all(layer: Layer, module: Module) -> bool:
    """Whether the layer has a place for all that the module holds."""
    start = len(module.path) + 1 if module.path else 0
    held = {
        f"{inner.path[start:]}.{name}" if inner is not module else name
        for inner in module.inside()
        for name in inner.tensors
    }
    return all(name in layer.parameters or name in _COUNTERS for name in held)
