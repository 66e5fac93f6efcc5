"""From nodes to boxes: modules are opened to a depth, equal items in a row are one.

Comes in: the tree of modules of each part. Goes out: boxes and groups, as `picture` has them. What
always holds: every node is in one box, and no box has nodes of two parts.

    depth 0     each part is one box
    depth 1     the modules that the model consists of, and the operators between them
    depth 2     those that they consist of, and so on

Equal items in a row (`Marks`) are one, with what they take added up; so are rows in which several
items recur in turn, which are opened as modules of their level are. Longer runs of operators
between modules are one box too, which is opened a level later: they tell less than modules do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby
from typing import TYPE_CHECKING

from shardwright.ir.drawing.facts import (
    given_types,
    operator_text,
    stored_bytes,
    tip_text,
    total_time,
)
from shardwright.ir.drawing.modules import Item, Marks, Module, module_tree, nodes_of
from shardwright.ir.drawing.parts import Parts, in_order_of_parts, runs
from shardwright.ir.drawing.picture import Box, Group, boxes_of
from shardwright.ir.repeats import Repeat, crossing_bytes, repeats
from shardwright.ir.steps import forward_nodes
from shardwright.ir.values import IRNode, Scope

if TYPE_CHECKING:
    from shardwright.ir.graph import IRGraph

LEGIBLE = 40
"""Boxes that a person still reads at a glance."""
CROWDED = 4 * LEGIBLE
"""Boxes up to which a picture of depth 1 says more than one of depth 0, which says nothing."""
LOOSE = 4
"""Operators in a row between modules that are one box."""
SPARED = 3
"""Nodes that folding must spare at least: two equal operators in a row are as clear as one."""

Tree = Sequence[tuple[int | None, tuple[Item, ...]]]
"""The items of each run of nodes in one part."""


def outline(
    graph: IRGraph,
    parts: Parts,
    times: Mapping[int, float],
    *,
    fold: bool = True,
    depth: int | None = None,
) -> tuple[Box | Group, ...]:
    """Boxes and groups of a graph, opened to a depth; by default as far as they stay legible."""
    nodes, together = in_order_of_parts(graph, parts)
    tree = _tree(graph, nodes, parts)
    writing = _Outline(graph, parts, times, fold, together, nodes)
    if depth is not None:
        return writing.at(tree, depth)
    shown = writing.at(tree, 0)
    for deeper in count(1):
        more = writing.at(tree, deeper)
        limit = CROWDED if deeper == 1 else LEGIBLE
        if more == shown or len(boxes_of(more)) > limit:
            return shown
        shown = more
    raise AssertionError("a tree of modules has an end")


def _tree(graph: IRGraph, nodes: Sequence[IRNode], parts: Parts) -> Tree:
    """Items by part. What a training step does with its gradients is one module without inside."""
    forward = {node.id for node in forward_nodes(graph)}
    found: list[tuple[int | None, tuple[Item, ...]]] = []
    for number, run in runs(nodes, parts):
        items = module_tree([node for node in run if node.id in forward])
        late = [node for node in run if node.id not in forward]
        found.append((number, (*items, *_late_items(late))))
    return found


def _late_items(nodes: Sequence[IRNode]) -> Iterator[Item]:
    """Each backward, and one module for what is done between and after them."""
    between: list[IRNode] = []
    for node in (*nodes, None):
        if node is not None and node.op != "Backward":
            between.append(node)
            continue
        if between:
            tree = module_tree(between)
            yield Module(Scope("", "update"), tree, tuple(between), opens=False)
            between = []
        if node is not None:
            yield node


@dataclass
class _Outline:
    """Writes boxes; `at` gives those of a depth."""

    graph: IRGraph
    parts: Parts
    times: Mapping[int, float]
    fold: bool
    together: bool
    order: Sequence[IRNode]
    depth: int = 0
    part: int | None = None
    written: int = 0
    marks: Marks = field(init=False)
    crossing: Mapping[int, int] = field(init=False)
    """Bytes that are alive before each node."""

    def __post_init__(self) -> None:
        self.marks = Marks(self.graph)
        before = crossing_bytes(self.graph, self.order)
        self.crossing = {node.id: n for node, n in zip(self.order, before, strict=False)}

    def at(self, tree: Tree, depth: int) -> tuple[Box | Group, ...]:
        """The picture's items at a depth."""
        self.depth, self.written = depth, 0
        return tuple(found for number, items in tree for found in self._run(number, items))

    def _run(self, number: int | None, items: tuple[Item, ...]) -> Iterator[Box | Group]:
        """One run of nodes in a part: framed, where the part has no other."""
        self.part = number
        if self.depth == 0:
            nodes = [node for item in items for node in nodes_of(item)]
            title = self.graph.name if number is None else self.parts.name(number)
            yield self._box(nodes, title, "", 1, is_module=True)
            return
        found = tuple(self._items([items], 1, ""))
        if self.together and number is not None:
            yield Group(self.parts.name(number), "", 1, number, found, is_part=True)
        else:
            yield from found

    def _items(
        self, copies: Sequence[Sequence[Item]], level: int, within: str
    ) -> Iterator[Box | Group]:
        """Items that stand in the same place of each of several equal modules.

        ``within`` is the path of the module that a frame is drawn around.
        """
        for run in self._between(copies[0], self._repeats(copies[0]), level):
            stacks = [
                [copy[i] for copy in copies for i in range(first, run.cuts[-1], run.length)]
                for first in range(run.start, run.start + run.length)
            ]
            if run.length == 1:
                yield from self._stack(stacks[0], run.count, level, within)
            else:
                yield self._row(stacks, run.count, level, within)

    def _between(
        self, items: Sequence[Item], found: Sequence[Repeat], level: int
    ) -> Iterator[Repeat]:
        """Rows and items, with longer runs of operators between modules as one."""

        def is_loose(row: Repeat) -> bool:
            return row.length * row.count == 1 and isinstance(items[row.start], IRNode)

        for loose, group in groupby(found, is_loose):
            rows = list(group)
            if loose and level + 1 >= self.depth and LOOSE <= len(rows) < len(items):
                yield Repeat(rows[0].start, len(rows), 1)
            else:
                yield from rows

    def _row(
        self, stacks: Sequence[Sequence[Item]], times: int, level: int, within: str
    ) -> Box | Group:
        """Several items that recur in turn."""
        nodes = [node for items in zip(*stacks, strict=True) for i in items for node in nodes_of(i)]
        inside = len(nodes) // len(stacks[0])
        title = f"{inside} operators"
        if level >= self.depth:
            return self._box(nodes, title, "", times, is_module=True)
        found = (self._stack(stack, 1, level + 1, within) for stack in stacks)
        return Group(title, "", times, self.part, tuple(item for items in found for item in items))

    def _stack(
        self, items: Sequence[Item], times: int, level: int, within: str
    ) -> Iterator[Box | Group]:
        """Equal items as one, of which ``times`` follow one another."""
        first = items[0]
        nodes = [node for item in items for node in nodes_of(item)]
        path = _paths([_path(item, within) for item in items[:times]])
        if not isinstance(first, Module) or len(first.nodes) == 1:
            yield self._box(nodes, operator_text(nodes[0]), path, times)
            return
        title = first.scope.cls.rpartition(".")[2] or first.scope.path
        if level >= self.depth or not first.opens:
            yield self._box(nodes, title, path, times, is_module=True)
            return
        copies = [item.items for item in items if isinstance(item, Module)]
        if len(first.items) == 1 and times == 1:
            yield from self._items(copies, level + 1, within)
        else:
            inside = tuple(self._items(copies, level + 1, first.scope.path))
            yield Group(title, path, times, self.part, inside)

    def _repeats(self, items: Sequence[Item]) -> list[Repeat]:
        """Rows of equal items, and all other items one by one, in order."""
        found: list[Repeat] = []
        for row in self._rows(items) if self.fold else ():
            found += _singles(found[-1].cuts[-1] if found else 0, row.start)
            found.append(row)
        return [*found, *_singles(found[-1].cuts[-1] if found else 0, len(items))]

    def _rows(self, items: Sequence[Item]) -> Iterator[Repeat]:
        """Rows that are worth folding."""
        crossing = [self.crossing[nodes_of(item)[0].id] for item in items]
        for row in repeats([self.marks.of(item) for item in items], [*crossing, 0], smallest=1):
            once = items[row.start : row.start + row.length]
            if sum(len(nodes_of(item)) for item in once) * (row.count - 1) >= SPARED:
                yield row

    def _box(
        self,
        nodes: Sequence[IRNode],
        title: str,
        path: str,
        times: int,
        *,
        is_module: bool = False,
    ) -> Box:
        self.written += 1
        return Box(
            name=f"b{self.written - 1}",
            title=title,
            path=path,
            count=times,
            part=self.part,
            nodes=tuple(node.id for node in nodes),
            types=given_types(self.graph, nodes),
            milliseconds=total_time(self.times, nodes),
            stored=stored_bytes(self.graph, nodes),
            is_module=is_module,
            tip=tip_text(self.graph, nodes),
        )


def _singles(start: int, stop: int) -> list[Repeat]:
    return [Repeat(i, 1, 1) for i in range(start, stop)]


def _path(item: Item, within: str) -> str:
    """Where an item is, as seen from a module around it."""
    path = item.scope.path if isinstance(item, Module) else item.scope
    return "" if path == within else path.removeprefix(f"{within}." if within else "")


def _paths(paths: Sequence[str]) -> str:
    """Paths as the first and the last, from where they differ: ``h.0 … 11``."""
    first, last = paths[0], paths[-1]
    if first == last:
        return first
    pairs = list(zip(first.split("."), last.split("."), strict=False))
    differ = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs) - 1)
    return f"{first} … {'.'.join(last.split('.')[differ:])}"
