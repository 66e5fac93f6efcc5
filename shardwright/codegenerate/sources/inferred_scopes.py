"""Modules of nodes, where only the names of stored values tell of them.

Comes in: a graph whose nodes are in no scope. Goes out: the modules of each node, outermost first.

    reads h.0.attn.c_attn.weight     stands in h.0.attn.c_attn
    stands between two such nodes    stands in the innermost module that has both
    begins or ends a repeated block  stands in the module that has all of the block
    anything else                    stands in none

What always holds: a path is one of the prefixes of stored values' names. Paths whose parts are
numbered and that store nothing themselves (``h``, ``encoder.layer``) are lists, and no module calls
them. A module of which no other is a part has the class ``""``, since it may be a layer of
torch.nn; every other has a plain name, made from its own: ``h.0`` is a Block, ``layer.3`` a Layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from shardwright.ir import IRGraph, IRNode
from shardwright.ir.repeats import repeated_blocks
from shardwright.ir.values import Scope

Path = tuple[str, ...]


def with_inferred_scopes(graph: IRGraph) -> IRGraph:
    """The graph with modules for its nodes; values and ids stay as they are."""
    modules = _Modules(graph)
    paths = _paths(graph, modules)
    nodes = [
        replace(node, scopes=modules.scopes(path))
        for node, path in zip(graph.nodes, paths, strict=True)
    ]
    return replace(graph, nodes=nodes)


class _Modules:
    """The modules that the names of stored values speak of."""

    def __init__(self, graph: IRGraph) -> None:
        self.graph = graph
        self.holders = {_holder(value.name) for value in graph.stored()}
        """Modules that store something themselves."""
        self.parts: dict[Path, set[str]] = {}
        """The last names of the modules within a module."""
        for holder in self.holders:
            for end in range(len(holder)):
                self.parts.setdefault(holder[:end], set()).add(holder[end])
        self._known: dict[Path, tuple[Scope, ...]] = {}

    def of(self, node: IRNode) -> Path | None:
        """The innermost module that has all that a node reads of stored values, if it does."""
        stored = [self.graph.values[value_id] for value_id in node.inputs]
        paths = [_holder(value.name) for value in stored if value.is_stored]
        return _common(paths) if paths else None

    def scopes(self, path: Path) -> tuple[Scope, ...]:
        """A module and those around it, outermost first."""
        if path not in self._known:
            prefixes = (path[:end] for end in range(1, len(path) + 1))
            self._known[path] = tuple(
                Scope(".".join(prefix), self._class(prefix))
                for prefix in prefixes
                if not self._is_list(prefix)
            )
        return self._known[path]

    def _is_list(self, path: Path) -> bool:
        parts = self.parts.get(path, ())
        return bool(parts) and path not in self.holders and all(map(str.isdigit, parts))

    def _class(self, path: Path) -> str:
        return class_name(path) if path in self.parts else ""


def class_name(path: Sequence[str]) -> str:
    """A plain class name for a module: ``self_attn`` is SelfAttn, ``layers.0`` a Layer."""
    name = next((part for part in reversed(path) if not part.isdigit()), "")
    if path[-1].isdigit():
        name = re.sub(r"(?<=[^s])s$", "", name.rstrip("0123456789"))
    words = [word for word in re.split(r"[^0-9A-Za-z]+", name) if word]
    made = "".join(word[0].upper() + word[1:] for word in words)
    return made if len(made) > 1 and not made[0].isdigit() else "Block"


def _holder(name: str) -> Path:
    """The module that stores a value of this name."""
    return tuple(name.split(".")[:-1])


def _common(paths: Iterable[Path]) -> Path:
    """The longest beginning that all paths have."""
    first, *others = paths
    for path in others:
        same = 0
        while same < min(len(first), len(path)) and first[same] == path[same]:
            same += 1
        first = first[:same]
    return first


def _paths(graph: IRGraph, modules: _Modules) -> list[Path]:
    """The innermost module of each node."""
    own = [modules.of(node) for node in graph.nodes]
    found: list[Path] = []
    for start, stop, is_block in _runs(graph):
        found += _filled(own[start:stop], is_block)
    return found


def _runs(graph: IRGraph) -> Iterator[tuple[int, int, bool]]:
    """The nodes in runs: repeated blocks, and what stands between them."""
    at = 0
    for repeat in repeated_blocks(graph):
        if at < repeat.start:
            yield at, repeat.start, False
        for i in range(repeat.count):
            yield repeat.start + i * repeat.length, repeat.start + (i + 1) * repeat.length, True
        at = repeat.cuts[-1]
    if at < len(graph.nodes):
        yield at, len(graph.nodes), False


def _filled(own: Sequence[Path | None], is_block: bool) -> list[Path]:
    """The modules of a run's nodes, from those of the nodes that read something stored."""
    read = [path for path in own if path is not None]
    around = _common(read) if is_block and read else ()
    before = _latest(own)
    after = _latest(own[::-1])[::-1]
    return [
        _common([a, b]) if a is not None and b is not None else around
        for a, b in zip(before, after, strict=True)
    ]


def _latest(own: Sequence[Path | None]) -> list[Path | None]:
    """For each place the last path up to there."""
    found: list[Path | None] = []
    for path in own:
        found.append(path if path is not None else found[-1] if found else None)
    return found
