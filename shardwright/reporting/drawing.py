"""Graphs as they are drawn, by plans and profiles.

Modules are opened to a depth: at 0 each part is one box, at 1 the modules that the model consists
of and the operators between them, at 2 those that they consist of, and so on. Equal layers in a
row, of one part, are one with a count; their times and bytes are added up. Every node is in one
box.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, groupby, pairwise, takewhile
from pathlib import Path, PurePath
from typing import NamedTuple, TypeVar

from shardwright.costs import Costs, Profile
from shardwright.errors import DrawError
from shardwright.ir import DROPOUT, IRGraph, IRNode, IRValue
from shardwright.ir.graph import forward_nodes, is_step
from shardwright.ir.repeats import fingerprint, repeats
from shardwright.ir.tensor_meta import (
    MILLISECOND,
    count_text,
    format_bytes,
    seconds_text,
    tensor_text,
)
from shardwright.planning import Partition, Plan
from shardwright.planning.assemble import planned, step_of
from shardwright.planning.layer_graph import LayerGraph
from shardwright.planning.plan import assignments, check_belongs
from shardwright.reporting.dot import Box, Drawing, Edge, check_format

T = TypeVar("T")

LEGIBLE = 40
"""Boxes that a person reads at a glance. Depth 1 may have four times as many: 0 says nothing."""
LOOSE, SPARED, ENDS = 4, 3, 8
"""Operators in a row between modules that are one box; nodes that a fold must spare, as two equal
operators are as clear as one; inputs, or outputs, that are drawn one by one."""


def draw(
    graph: IRGraph | LayerGraph,
    path: str | Path | None = None,
    *,
    plan: Plan | None = None,
    partition: Partition | Mapping[int, int] | None = None,
    profile: Profile | Costs | Mapping[int, float] | None = None,
    fold: bool = True,
    depth: int | None = None,
    caption: str = "",
) -> Drawing:
    """Draw a graph as DOT text, and write it if a path is given; images need Graphviz.

    Colours are the stages of a plan or a partition, or numbers by node id. With a plan, the graph
    is drawn as the plan cuts it. The size of a box is its time: forward, and backward in a training
    step. Times that a profile does not have are estimated; they may also be given in milliseconds
    by node id. ``fold`` draws equal consecutive layers as one. ``depth`` is how far modules are
    opened, by default as far as the picture is legible. ``caption`` is a line below the graph's
    name. A `LayerGraph` is drawn as its graph, with its partition if it has one.

    Raises PlanError if the plan is for another graph, DrawError for every other invalid argument.
    """
    if path is not None:
        check_format(path)
    if depth is not None and (type(depth) is not int or depth < 0):
        raise DrawError(
            f"depth={depth!r}: how far to open modules is a number from 0 up, or None for as far "
            "as the picture stays legible"
        )
    if isinstance(graph, LayerGraph):
        partition = graph.partition if plan is None and partition is None else partition
        graph = graph.graph
    if isinstance(graph, Plan):
        raise DrawError("a plan is drawn with the graph it is of: sw.draw(graph, plan=plan)")
    if not isinstance(graph, IRGraph):
        found = type(graph).__name__
        raise DrawError(f"graph is a {found}; give what capture, compile_ir or build_graph returns")
    if plan is not None and partition is not None:
        raise DrawError("give either a plan or a partition, which both say how nodes are coloured")
    graph, parts, names = _staged(graph, partition) if plan is None else _cut(graph, plan)
    times = node_times(graph, profile or {})
    order, has_frames = _in_order_of_parts(graph, parts)
    forward = {node.id for node in forward_nodes(graph)}
    runs = []
    for part, nodes in groupby(order, lambda node: parts.get(node.id)):
        groups = list(_groups(graph, nodes, forward))
        runs.append((part, _folded(groups) if fold else groups))
    results = {*graph.outputs, *graph.updates.values()}
    outline = _DrawingOutline(graph, results, names, times, runs, has_frames)
    items = outline.legible() if depth is None else outline.opened(depth)
    boxes = [box for box in chain.from_iterable(items) if not box.items]
    ends = list(_ends(graph))
    legend = {number: names[number] for number in sorted(set(parts.values()))}
    edges = tuple(_edges(graph, boxes, ends))
    drawing = Drawing(graph.name, caption, legend, items, tuple(end[0] for end in ends), edges)
    if path is not None:
        drawing.save(path)
    return drawing


# --- parts and times ------------------------------------------------------------------------------


def _staged(
    graph: IRGraph, partition: Partition | Mapping[int, int] | None
) -> tuple[IRGraph, Mapping[int, int], dict[int, str]]:
    """A graph, the part of each node by id, and what parts are called."""
    if not isinstance(partition, Partition | Mapping | None):
        raise DrawError(
            f"partition is a {type(partition).__name__}; give a Partition or numbers by node id, "
            "or draw a plan with sw.draw(graph, plan=plan)"
        )
    if not isinstance(partition, Partition):
        given = _of(graph, "partition", partition or {})
        return graph, given, {number: f"part {number}" for number in given.values()}
    ids = [node.id for node in forward_nodes(graph)]
    if len(partition.stages) != len(ids):
        raise DrawError(
            f"partition has {len(partition.stages)} stages' numbers, the graph {graph.name!r} has "
            f"{len(ids)} forward nodes; give the partition of this graph"
        )
    stages = dict(zip(ids, partition.stages, strict=True))
    return graph, stages, {number: f"stage {number}" for number in partition.stages}


def _cut(graph: IRGraph, plan: Plan) -> tuple[IRGraph, dict[int, int], dict[int, str]]:
    """The graph that a plan assigns, by stages, or by sets of devices where it has none."""
    check_belongs(plan, graph)
    if plan.training is None:
        graph, stages = planned(graph, plan), plan.stages
        ids = [node.id for node in graph.nodes]
    else:
        step = step_of(graph, plan)
        graph, stages = step.graph, plan.training.stages
        ids = [node.id for node in graph.nodes[: step.forward]]
    devices = [assignment.mesh.devices for assignment in assignments(plan, len(ids))]
    sets = {found: number for number, found in enumerate(dict.fromkeys(devices))}
    apart = sum(map(len, sets)) == len({device for found in sets for device in found})
    prefix = "stage {} on " if stages or (apart and len(sets) > 1) else ""
    stages = stages or tuple(sets[found] for found in devices)
    on: dict[int, dict[str, None]] = {}
    for stage, found in zip(stages, devices, strict=True):
        on.setdefault(stage, {}).update(dict.fromkeys(found))
    names = {stage: prefix.format(stage) + " ".join(found) for stage, found in on.items()}
    return graph, dict(zip(ids, stages, strict=True)), names


def node_times(
    graph: IRGraph, profile: Profile | Costs | Mapping[int, float]
) -> Mapping[int, float]:
    """Milliseconds of each forward node; of a training step with those of its backward."""
    if isinstance(profile, Mapping):
        for node_id, time in _of(graph, "profile", profile).items():
            if not (time >= 0 and math.isfinite(time)):
                raise DrawError(f"profile: node {node_id} takes {time!r}; expected milliseconds")
        return profile
    costs = profile.costs() if isinstance(profile, Profile) else profile
    found = {node.id: costs.node(graph, node) for node in forward_nodes(graph)}
    step = is_step(graph)
    return {i: (c.total if step else c.forward) / MILLISECOND for i, c in found.items()}


def _of(graph: IRGraph, what: str, given: Mapping[int, T]) -> Mapping[int, T]:
    """What is given by the ids of a graph's nodes. Raises DrawError for others."""
    unknown = given.keys() - {node.id for node in graph.nodes}
    if unknown:
        found = f"{what}: the graph {graph.name!r} has no node {min(unknown)}"
        raise DrawError(f"{found}; keys are the ids of its nodes")
    return given


# --- from nodes to boxes --------------------------------------------------------------------------


class _ModuleBox(NamedTuple):
    """A module around nodes, or a row of ``times`` equal ones, whose first node is ``first``."""

    title: str
    paths: tuple[str, ...] = ()
    times: int = 1
    first: int = -1


class _Group(NamedTuple):
    """What is always in one box: a node with those it is folded with, or an update's nodes.

    ``size`` is the number of nodes in one copy; groups of equal marks do the same.
    """

    nodes: tuple[IRNode, ...]
    modules: tuple[_ModuleBox, ...]
    mark: Hashable
    size: int = 1
    times: int = 1


def _in_order_of_parts(graph: IRGraph, parts: Mapping[int, int]) -> tuple[list[IRNode], bool]:
    """Nodes by part, in none last, if no part reads what a later one makes; and whether so."""
    key = {node.id: parts.get(node.id, math.inf) for node in graph.nodes}
    values = graph.values
    flows = ((key[node.id], values[v].users) for node in graph.nodes for v in node.outputs)
    if not parts or any(part > key[user] for part, users in flows for user in users):
        return list(graph.nodes), False
    return sorted(graph.nodes, key=lambda node: key[node.id]), True


def _groups(graph: IRGraph, nodes: Iterable[IRNode], forward: set[int]) -> Iterator[_Group]:
    """A group a node; what a training step does between and after its backwards is one each."""
    order = sorted(nodes, key=lambda node: node.id not in forward)
    for is_late, run in groupby(order, lambda n: n.id not in forward and n.op != "Backward"):
        found = tuple(run)
        if is_late and len(found) > 1:
            yield _Group(found, (_ModuleBox("update"),), found[0].id, len(found))
            continue
        for node in found:
            modules = (
                _ModuleBox(s.cls.rpartition(".")[2] or s.path, (s.path,)) for s in node.scopes
            )
            # Layers differ by their numbers, and dropouts by which mask they draw.
            scopes = tuple((re.sub(r"\b\d+\b", "", s.path), s.cls) for s in node.scopes)
            drops = {"seed": 0, "site": 0} if node.op == DROPOUT else {}
            same = replace(node, attrs={**node.attrs, **drops})
            yield _Group((node,), tuple(modules), (fingerprint(graph, same), scopes))


def _folded(groups: Sequence[_Group]) -> list[_Group]:
    """Rows of equal groups as one, cut where the fewest modules are; and rows in these too."""
    numbers: dict[Hashable, int] = {}
    marks = [numbers.setdefault(group.mark, len(numbers)) for group in groups]
    around = [0, *map(_shared, pairwise(groups)), 0]
    found: list[_Group] = []
    done = 0
    for row in repeats(marks, around, smallest=1):
        copies = [groups[start:stop] for start, stop in pairwise(row.cuts)]
        size = sum(group.size for group in copies[0])
        level = _shared([*chain.from_iterable(copies)])
        is_split = any(around[cut] > level for cut in row.cuts)
        if size * (row.count - 1) < SPARED or is_split or len(set(map(_wiring, copies))) > 1:
            continue
        merged = (chain.from_iterable(g.nodes for g in same) for same in zip(*copies, strict=True))
        unit = [g._replace(nodes=tuple(n)) for g, n in zip(copies[0], merged, strict=True)]
        unit = _folded(unit) if len(unit) > 1 else unit
        own, inner = [_ModuleBox(f"{size} operators")], level
        if _shared(copies[0]) > level:
            first, last = (copies[i][0].modules[level] for i in (0, -1))
            own, inner = [first._replace(paths=(first.paths[0], last.paths[-1]))], level + 1
        elif len(unit) == 1:
            own, unit = [], [unit[0]._replace(times=row.count)]
        own = [m._replace(times=row.count, first=unit[0].nodes[0].id) for m in own]
        unit = [g._replace(modules=(*g.modules[:level], *own, *g.modules[inner:])) for g in unit]
        found += [*groups[done : row.start], *unit]
        done = row.cuts[-1]
    return [*found, *groups[done:]]


def _wiring(groups: Sequence[_Group]) -> tuple[tuple[int, ...], ...]:
    """Which results of one another groups read."""
    nodes = [group.nodes[0] for group in groups]
    made = {v: i for i, v in enumerate(chain.from_iterable(node.outputs for node in nodes))}
    return tuple(tuple(made.get(v, -1) for v in node.inputs) for node in nodes)


def _shared(groups: Sequence[_Group]) -> int:
    """How many modules stand around all of the groups."""
    levels = zip(*(group.modules for group in groups), strict=False)
    return sum(1 for _ in takewhile(lambda found: len({*found}) == 1, levels))


@dataclass(frozen=True, slots=True)
class _DrawingOutline:
    """Runs of groups, each in a part, as the boxes that they are at a depth."""

    graph: IRGraph
    results: set[int]
    names: Mapping[int, str]
    times: Mapping[int, float]
    runs: Sequence[tuple[int | None, Sequence[_Group]]]
    has_frames: bool

    def legible(self) -> tuple[Box, ...]:
        """As deep as a person reads it at a glance."""
        shown = self.opened(0)
        for depth in count(1):
            more = self.opened(depth)
            boxes = sum(not box.items for box in chain.from_iterable(more))
            if more == shown or boxes > (4 * LEGIBLE if depth == 1 else LEGIBLE):
                break
            shown = more
        return shown

    def opened(self, depth: int) -> tuple[Box, ...]:
        """Boxes and frames at a depth; parts are frames where data flows on through them."""
        found: list[Box] = []
        for part, groups in self.runs:
            title = self.graph.name if part is None else self.names[part]
            items = self._items(groups, part, depth, 0, "")
            if depth == 0:
                found.append(self._box(_ModuleBox(title), groups, part))
            elif self.has_frames and part is not None:
                found.append(Box("", title, part=part, items=tuple(items)))
            else:
                found += items
        return tuple(found)

    def _items(
        self, groups: Sequence[_Group], part: int | None, depth: int, level: int, within: str
    ) -> Iterator[Box]:
        """Groups around which ``level`` modules are opened, the last one's path ``within``."""
        for module, given in groupby(groups, lambda g: (g.modules[level:] or (None,))[0]):
            run = list(given)
            counts = [m.times for m in run[0].modules[level + 1 :]]
            if module is None and level + 1 == depth and LOOSE <= len(run) < len(groups):
                size = sum(group.size * group.times for group in run)
                yield self._box(_ModuleBox(f"{size} operators"), run, part)
            elif module is None:
                for group in run:
                    own = _ModuleBox("", (group.nodes[0].scope,), group.times)
                    yield self._box(own, [group], part, within)
            elif len(run) == run[0].size == run[0].times == 1 == max(counts, default=1):
                yield self._box(module._replace(title=""), run, part, within)
            elif level + 1 >= depth or run[0].size > 1:
                yield self._box(module, run, part, within)
            elif module.times == 1 and _shared(run) > level + 1:
                yield from self._items(run, part, depth, level + 1, within)
            else:
                inner = (*module.paths, within)[0]
                items = tuple(self._items(run, part, depth, level + 1, inner))
                path = _path_text(module.paths, within)
                yield Box("", module.title, path, module.times, part, (), items, is_module=True)

    def _box(
        self, module: _ModuleBox, groups: Sequence[_Group], part: int | None, within: str = ""
    ) -> Box:
        """A box with where it is, what it gives to others and what it takes."""
        nodes = tuple(chain.from_iterable(group.nodes for group in groups))
        values, inside = self.graph.values, {node.id for node in nodes}
        made = [values[v] for node in nodes for v in node.outputs]
        given = [v for v in made if v.id in self.results or not inside.issuperset(v.users)] or made
        types = list(dict.fromkeys(map(_type_text, given)))
        known = [self.times[node.id] for node in nodes if node.id in self.times]
        stored = {v for node in nodes for v in node.inputs if values[v].is_stored}
        nbytes = sum(values[v].nbytes for v in stored)
        takes = [seconds_text(MILLISECOND * sum(known))] * any(known)
        takes += [f"{format_bytes(nbytes)} stored"] * (nbytes > 0)
        path = _path_text(module.paths, within)
        lines = (path, ", ".join(types[:2]) + " …" * (len(types) > 2), ", ".join(takes))
        source = nodes[0].source
        at = "" if source is None else f", {PurePath(source.file).name}:{source.line}"
        return Box(
            f"b{nodes[0].id}",
            module.title or _operator_text(nodes[0]),
            *(path, module.times, part, nodes, (), bool(module.title)),
            milliseconds=sum(known) if known else None,
            lines=tuple(filter(None, lines)),
            tip=(nodes[0].op if len(nodes) == 1 else f"{len(nodes)} operators") + at,
        )


def _ends(graph: IRGraph) -> Iterator[tuple[Box, Sequence[int]]]:
    """Inputs, outputs and updates with their values; many are one."""
    inputs = [graph.values[value_id].name for value_id in graph.inputs]
    for kind, ids, names in (
        ("in", graph.inputs, inputs),
        ("out", graph.outputs, graph.output_names),
    ):
        if len(ids) > ENDS:
            says = (count_text(len(ids), "tensor"),)
            yield Box(kind, f"{len(ids)} {kind}puts", lines=says), ids
            continue
        for i, (value_id, name) in enumerate(zip(ids, names, strict=True)):
            yield Box(f"{kind}{i}", name, lines=(_type_text(graph.values[value_id]),)), [value_id]
    if updated := list(graph.updates.values()):
        says = (count_text(len(updated), "tensor"),)
        yield Box("updates", f"{len(updated)} updated", lines=says), updated


def _edges(
    graph: IRGraph, boxes: Sequence[Box], ends: Sequence[tuple[Box, Sequence[int]]]
) -> Iterator[Edge]:
    """All that flows: an edge at most between two boxes, and none within one."""
    box_of = {node.id: box.name for box in boxes for node in box.nodes}
    reads = [(v, box_of[node.id]) for node in graph.nodes for v in node.inputs]
    made = {v: box_of[node.id] for node in graph.nodes for v in node.outputs}
    for end, value_ids in ends:
        if end.name.startswith("in"):
            made |= dict.fromkeys(value_ids, end.name)
        else:
            reads += [(v, end.name) for v in value_ids]
    sizes: dict[tuple[str, str], dict[int, int]] = {}
    for v, target in reads:
        if made.get(v, target) != target:
            sizes.setdefault((made[v], target), {})[v] = graph.values[v].nbytes
    order = {box.name: (i, box.part) for i, box in enumerate(boxes)}
    for (source, target), found in sizes.items():
        crosses = leads_back = False
        if source in order and target in order:
            (i, part), (j, other) = order[source], order[target]
            crosses, leads_back = part != other, i > j
        yield Edge(source, target, tuple(found.values()), crosses, leads_back)


def _operator_text(node: IRNode) -> str:
    """An operator without its namespace and overload: ``linear``."""
    return node.op.split(".")[1] if "." in node.op else node.op


def _type_text(value: IRValue) -> str:
    return tensor_text(value.dtype, value.shape)


def _path_text(paths: Sequence[str], within: str) -> str:
    """Paths in a module as the first, and the last from where they differ: ``h.0 … 11``."""
    inside = ["" if p == within else p.removeprefix(f"{within}." if within else "") for p in paths]
    if len(set(inside)) < 2:
        return "".join(inside[:1])
    first, last = inside[0].split("."), inside[-1].split(".")
    differ = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
    return f"{inside[0]} … {'.'.join(last[differ:])}"
