"""The modules of a stage: which there are, what each holds, and to which each node belongs.

Every name of every stored value has its place in the tree, so that a state dict has the original's
names; a node belongs to the deepest module around it, of those that lie in one another by their
paths. A module that is called under another name than its first, as T5's ``shared`` is in its
encoder, is found under that name by the parameters that it shares.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

from shardwright.codegenerate.stages import StageProgram
from shardwright.ir import IRGraph, IRNode, IRValue, Scope


@dataclass(eq=False)
class Module:
    """A module of one stage.

    cls, arguments
        Its class's qualified name, where it is called and the name is known, and what its
        constructor takes, as a `Scope` says it.
    called
        Whether nodes of the stage say that they lie in it.
    children
        By name, in the order of the original as far as it is known.
    tensors
        What it holds itself: stored values by name.
    """

    path: str = ""
    cls: str = ""
    arguments: tuple[tuple[str, Any], ...] | None = None
    called: bool = False
    parent: Module | None = None
    children: dict[str, Module] = field(default_factory=dict)
    tensors: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition(".")[2]

    def child(self, name: str) -> Module:
        """The child of a name, made where there is none."""
        if name not in self.children:
            path = f"{self.path}.{name}" if self.path else name
            self.children[name] = Module(path, parent=self)
        return self.children[name]

    def at(self, path: str) -> Module:
        """The module at a path below this one, made where there is none."""
        module = self
        for name in path.split(".") if path else ():
            module = module.child(name)
        return module

    def upwards(self) -> Iterator[Module]:
        """This module and those around it, the innermost first."""
        module: Module | None = self
        while module is not None:
            yield module
            module = module.parent

    def down_to(self, other: Module) -> list[Module]:
        """The modules on the way from this one, left out, to one inside it."""
        return list(reversed([m for m in other.upwards() if is_under(m.path, self.path)]))

    def inside(self) -> Iterator[Module]:
        """This module and all below it."""
        yield self
        for child in self.children.values():
            yield from child.inside()


@dataclass(frozen=True, slots=True)
class Home:
    """Where a stored value stands under one of its names."""

    module: Module
    name: str

    @property
    def path(self) -> str:
        """Its name in a state dict."""
        return f"{self.module.path}.{self.name}" if self.module.path else self.name


@dataclass(frozen=True, slots=True)
class ModuleTree:
    """A stage's modules.

    chains
        For each node the called modules around it, outermost first, without the root.
    homes
        For each stored value where it stands, the leading name first.
    """

    root: Module
    chains: dict[int, tuple[Module, ...]]
    homes: dict[int, tuple[Home, ...]]


def is_under(path: str, other: str) -> bool:
    """Whether a module lies in another, by their paths."""
    return path.startswith(f"{other}.") if other else bool(path)


def model_names(program: StageProgram) -> frozenset[str]:
    """The names that the model has for its tensors, in whichever stage they are."""
    stages = (stage for partition in program.partitions for stage in partition)
    stored = (value for stage in stages for value in stage.graph.stored())
    return frozenset(name for value in stored if not _is_loose(value) for name in value.names)


def module_tree(graph: IRGraph, taken: Collection[str] = ()) -> ModuleTree:
    """The modules of a stage's graph; what the model has no name for gets none that is taken."""
    root = Module(called=True)
    stored = [value for value in graph.stored() if not _is_loose(value)]
    homes = {value.id: [_put(root, value.names[0], value.id)] for value in stored}
    for value in stored:
        homes[value.id] += [_put(root, name, value.id) for name in value.names[1:]]
    chains = _chains(graph, root, _aliases(stored))
    for value in graph.stored():
        if _is_loose(value):
            around = [chains[user] for user in value.users]
            homes[value.id] = [_put_loose(root, value, around, taken)]
    return ModuleTree(root, chains, {key: tuple(found) for key, found in homes.items()})


def _is_loose(value: IRValue) -> bool:
    """Whether a value belongs to no module: a tensor that the program closes over."""
    return value.role not in ("param", "buffer") and not any("." in name for name in value.names)


def _put(root: Module, name: str, value_id: int) -> Home:
    path, _, leaf = name.rpartition(".")
    module = root.at(path)
    module.tensors[leaf] = value_id
    return Home(module, leaf)


def _put_loose(
    root: Module, value: IRValue, chains: Sequence[tuple[Module, ...]], taken: Collection[str]
) -> Home:
    """A constant stands in the innermost module around all of its users."""
    module = root
    for level in zip(*chains, strict=False):
        if len(set(level)) == 1:
            module = level[0]
    own = {*module.tensors, *module.children}
    home, number = Home(module, "constant"), 1
    while home.name in own or home.path in taken:
        home, number = Home(module, f"constant_{number}"), number + 1
    module.tensors[home.name] = value.id
    return home


# --- chains ---------------------------------------------------------------------------------------


def _aliases(stored: Iterable[IRValue]) -> dict[str, list[str]]:
    """Paths of modules with the same parameters, by path."""
    found: dict[str, list[str]] = {}
    for value in stored:
        parts = [name.rpartition(".") for name in value.names]
        for (path, _, leaf), (other, _, other_leaf) in permutations(parts, 2):
            if leaf == other_leaf and other not in found.setdefault(path, []):
                found[path].append(other)
    return found


def _chains(
    graph: IRGraph, root: Module, aliases: dict[str, list[str]]
) -> dict[int, tuple[Module, ...]]:
    """The called modules around each node; modules without parameters are put into the tree."""
    known: dict[tuple[Scope, ...], tuple[Module, ...]] = {}
    last: dict[Module, Module] = {}
    for node in graph.nodes:
        if node.scopes not in known:
            known[node.scopes] = tuple(_chain(node, root, aliases, last))
        for module in known[node.scopes]:
            for inner in module.upwards():
                if inner.parent is not None:
                    last[inner.parent] = inner
    return {node.id: known[node.scopes] for node in graph.nodes}


def _chain(
    node: IRNode, root: Module, aliases: dict[str, list[str]], last: dict[Module, Module]
) -> Iterator[Module]:
    module = root
    for scope in node.scopes:
        paths = (scope.path, *aliases.get(scope.path, ()))
        path = next((p for p in paths if is_under(p, module.path)), None)
        if path is None:
            continue  # called from somewhere else than where it lies: its nodes are the caller's
        relative = path[len(module.path) :].lstrip(".")
        for name in relative.split("."):
            _make_room(module, name, last)
            module = module.child(name)
        module.called, module.cls, module.arguments = True, scope.cls, scope.arguments
        yield module


def _make_room(module: Module, name: str, last: dict[Module, Module]) -> None:
    """Put a child without parameters behind the one that is called before it."""
    if name in module.children:
        return
    before = last.get(module)
    children = list(module.children.values())
    at = children.index(before) + 1 if before in children else 0
    behind = children[at:]
    for child in behind:
        del module.children[child.name]
    module.child(name)
    for child in behind:
        module.children[child.name] = child
