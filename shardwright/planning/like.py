"""A plan for another graph of the same model, on the slots of one that is planned.

Input: the graph (an evaluation, a call or step of other shapes), the planned graph, a model or a
training step, and its plan. Output: a plan in which what reads a parameter runs where the planned
graph has the parameter, split as it is there. Invariant: nodes stand in stages that never go back,
so that what flows between them flows one way.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec

from shardwright.clusters import Mesh
from shardwright.errors import PlanError
from shardwright.ir import IRGraph, IRNode, IRValue
from shardwright.ir.graph import is_step
from shardwright.ops.bound import BoundDimop, Carry
from shardwright.ops.catalog import dimop_of
from shardwright.ops.independence import Annotations
from shardwright.planning.assemble import make_plan, planned, shards_of, step_of
from shardwright.planning.follow import SplitPropagation
from shardwright.planning.fusions import find_fusions
from shardwright.planning.mesh_plan import stage_work
from shardwright.planning.options import StepOptions
from shardwright.planning.pipeline import measure_work
from shardwright.planning.plan import (
    Assignment,
    Plan,
    Split,
    Terms,
    TrainingPlan,
    check_belongs,
    fingerprint_graph,
    input_texts,
)
from shardwright.planning.rules import compatible, whole_notes
from shardwright.planning.step import as_step, check_one_backward, with_prepared
from shardwright.planning.unfuse import unfuse


def plan_beside(graph: IRGraph, first: IRGraph, plan: Plan, microbatches: int = 1) -> Plan:
    """The plan of ``graph``, a forward or a step, on the slots of ``plan``, which is of ``first``.

    A step has the schedule of that one, with so many microbatches of its own. Raises PlanError
    where ``plan`` is of another graph, or of no training step though this is one, or where the
    graph cannot be cut or split that way.
    """
    check_belongs(plan, first)
    base = _planned(first, plan)
    unfused = _taken_apart(graph, first, plan)
    apart = unfuse(graph, unfused)
    if not is_step(graph):
        made, stages = _beside(apart, base, plan)
        _check_used(graph, made)
        ordered = bool(plan.stages) or plan.training is not None or stages != [*base.stages]
        made = msgspec.structs.replace(made, stages=tuple(stages) if ordered else ())
    elif plan.training is None:
        raise PlanError(f"the plan for {plan.graph!r} is of no training step")
    else:
        check_one_backward(graph)
        step = as_step(apart, microbatches, shards_of(plan))
        work = measure_work(step, step.view, microbatches)
        made, stages = _beside(step.view, base, plan, len(step.prepare), work)
        training = _in_time(plan.training, microbatches, stages, work)
        made = msgspec.structs.replace(made, training=training)
    return msgspec.structs.replace(
        made, fingerprint=fingerprint_graph(graph), unfused=unfused, cluster=plan.cluster
    )


class _PlannedGraph(NamedTuple):
    """A planned graph: the stages of its leading nodes, of which the first ``prepared`` run once
    a step."""

    graph: IRGraph
    stages: Sequence[int]
    prepared: int = 0


def _planned(graph: IRGraph, plan: Plan) -> _PlannedGraph:
    """The graph whose nodes a plan assigns; a model's stages are its runs of nodes on one mesh."""
    if plan.training is not None:
        step = step_of(graph, plan)
        return _PlannedGraph(step.graph, plan.training.stages, len(step.prepare))
    meshes = [plan.assignments[index].mesh for index in plan.nodes]
    changes = (here != before for before, here in pairwise(meshes))
    runs = tuple(accumulate(changes, initial=0)) if meshes else ()
    return _PlannedGraph(planned(graph, plan), plan.stages or runs)


def _beside(
    graph: IRGraph,
    base: _PlannedGraph,
    plan: Plan,
    prepared: int = 0,
    work: Sequence[int] | None = None,
) -> tuple[Plan, list[int]]:
    """The plan of a forward, and the stage of each node; the first ``prepared`` run once a step."""
    meshes = {stage: plan.assignments[plan.nodes[i]].mesh for i, stage in enumerate(base.stages)}
    stages = _stages(graph, base, meshes, prepared)
    if prepared:
        stages = with_prepared(graph, stages[prepared:])
    there = [meshes[stage] for stage in stages]
    splits = splits_beside(graph, there, base.graph, plan)
    assigned = [Assignment(mesh, split) for mesh, split in zip(there, splits, strict=True)]
    notes = whole_notes(graph, splits)
    return make_plan(graph, plan.policy, plan.devices, assigned, notes, work=work), stages


def _check_used(graph: IRGraph, plan: Plan) -> None:
    """Raise PlanError where a mesh axis splits nothing of a forward, so that slots are idle."""
    used: dict[str, tuple[int, bool]] = {}
    for assignment in plan.assignments:
        mesh = assignment.mesh
        for axis, size, split in zip(mesh.axes, mesh.sizes, assignment.splits, strict=True):
            most, splits = used.get(axis, (1, False))
            used[axis] = max(most, size), splits or split is not None
    for axis, (size, splits) in used.items():
        if size > 1 and not splits:
            raise PlanError(
                f"nothing in the graph {graph.name!r} with the inputs "
                f"{', '.join(input_texts(graph))} can be split in {size} along the mesh axis "
                f"{axis!r}, as the planned one is; give batches of {size} samples or more"
            )


def _in_time(
    training: TrainingPlan, microbatches: int, stages: Sequence[int], work: Sequence[int]
) -> TrainingPlan:
    """A step's plan in time with other microbatches. Raises PlanError where they are too few."""
    ranks = len(training.slots)
    options = StepOptions(microbatches, training.schedule, training.chunks)
    return msgspec.structs.replace(
        training,
        microbatches=microbatches,
        stages=tuple(stages),
        work=stage_work(work, stages, options.schedule_on(ranks).stages),
    )


def _taken_apart(graph: IRGraph, step_graph: IRGraph, plan: Plan) -> tuple[int, ...]:
    """The fused products of the parameters whose products the step takes apart."""
    names = {
        name
        for position in plan.unfused
        for value_id in step_graph.nodes[position].inputs
        for name in step_graph.values[value_id].names
    }
    found = find_fusions(graph) if names else {}
    return tuple(
        position
        for position in found
        if any(names.intersection(graph.values[v].names) for v in graph.nodes[position].inputs)
    )


def _homes(base: _PlannedGraph) -> dict[Part, set[int]]:
    """The stages that read each stored value, or each part of a fused one."""
    homes: dict[Part, set[int]] = {}
    for node, stage in zip(base.graph.nodes, base.stages, strict=False):
        for value_id in node.inputs:
            for part in parts_of(base.graph.values[value_id]):
                homes.setdefault(part, set()).add(stage)
    return homes


def _stages(
    graph: IRGraph, base: _PlannedGraph, meshes: Mapping[int, Mesh], prepared: int
) -> list[int]:
    """The stage of each node: the first on slots with its parameters, not before what it reads.

    Where the nodes behind the ``prepared`` ones are those of the planned graph, each is where it is
    there.
    """
    homes = _homes(base)
    there = base.stages[base.prepared :]
    nodes = base.graph.nodes[base.prepared : len(base.stages)]
    same = node_keys(graph, graph.nodes[prepared:]) == node_keys(base.graph, nodes)
    wanted = [0] * prepared + (list(there) if same else [0] * (len(graph.nodes) - prepared))
    made: dict[int, int] = {}
    found = []
    for node, stage_there in zip(graph.nodes, wanted, strict=True):
        first = max((made.get(v, 0) for v in node.inputs), default=0)
        needed = _needed(graph, node, homes)
        stage = max(first, stage_there)
        if not _has_all(stage, needed, meshes):
            stage = _first_home(needed, first, meshes)
        made.update(dict.fromkeys(node.outputs, stage))
        found.append(stage)
    return found


def _needed(graph: IRGraph, node: IRNode, homes: Mapping[Part, set[int]]) -> list[set[int]]:
    """The stages that have each stored value that a node reads."""
    parts = (part for v in node.inputs for part in parts_of(graph.values[v])[:1])
    return [homes[part] for part in parts if part in homes]


def _first_home(needed: Sequence[set[int]], first: int, meshes: Mapping[int, Mesh]) -> int:
    """The first stage from one on whose slots have all that is needed.

    Where there is none, the first that is not before any of the values' own.
    """
    for stage in sorted(meshes):
        if stage >= first and _has_all(stage, needed, meshes):
            return stage
    return max([first, *map(min, needed)])


def _has_all(stage: int, needed: Sequence[set[int]], meshes: Mapping[int, Mesh]) -> bool:
    """Whether a stage's slots have all of the stored values that are needed."""
    return all(any(meshes[stage] == meshes[home] for home in homes) for homes in needed)


# --- splits ---------------------------------------------------------------------------------------
#
# A stored value that the step has is read as the step holds it, as far as annotations allow.
#
# A node that does in both graphs the same, at the same place of the model and with the same stored
# values, is split alike. Where lengths differ (a batch of another size) it is split by the same, in
# units that fit, or not at all where a batch has fewer rows than there are slots. Where the step
# has no such node (a batch norm that no longer counts) a split is followed on from what the node
# reads.


Part = tuple[str, tuple[tuple[int, int], ...] | None]
"""A stored value by its name, and which part of it, where a fused one is unfused."""
Key = tuple[str, str, tuple[Part, ...], int]
"""Scope, operator, stored values read, and how many such nodes come before."""
Held = tuple[int, int] | None
"""The dimension of a stored value that an axis splits, and the unit; None where it is whole."""
WHOLE = Carry("whole")


def splits_beside(
    graph: IRGraph, meshes: Sequence[Mesh], step: IRGraph, plan: Plan
) -> list[tuple[Split | Terms | None, ...]]:
    """What each axis of a node's mesh splits of it, for each node of ``graph``.

    ``step`` is the graph whose leading nodes ``plan`` assigns.
    """
    assigned = [plan.assignments[index] for index in plan.nodes]
    axes = dict.fromkeys(axis for mesh in meshes for axis in mesh.axes)
    columns = {axis: _BesideSplits(graph, meshes, step, assigned, axis) for axis in axes}
    found = {axis: column.run() for axis, column in columns.items()}
    splits = []
    for i, (node, mesh) in enumerate(zip(graph.nodes, meshes, strict=True)):
        made = tuple(found[axis][i] for axis in mesh.axes)
        alike = all(node.id in columns[axis].kept for axis in mesh.axes)
        splits.append(made if alike else compatible(graph, node, mesh.sizes, made))
    return splits


def node_keys(graph: IRGraph, nodes: Iterable[IRNode]) -> list[Key]:
    """By what each node is known in another graph of the same model."""
    seen: Counter[tuple[str, str, tuple[Part, ...]]] = Counter()
    keys = []
    for node in nodes:
        kind = node.scope, node.op, tuple(_stored_parts(graph, node))
        keys.append((*kind, seen[kind]))
        seen[kind] += 1
    return keys


def parts_of(value: IRValue) -> list[Part]:
    """A stored value under each of its names."""
    return [(name, value.placements) for name in value.names]


def _stored_parts(graph: IRGraph, node: IRNode) -> list[Part]:
    """The stored values that a node reads."""
    return [part for v in node.inputs for part in parts_of(graph.values[v])[:1]]


def _size(mesh: Mesh, axis: str) -> int:
    return mesh.sizes[mesh.axes.index(axis)] if axis in mesh.axes else 1


@dataclass(slots=True)
class _BesideSplits:
    """The splits along one axis; `run` gives them."""

    graph: IRGraph
    meshes: Sequence[Mesh]
    step: IRGraph
    assigned: Sequence[Assignment]
    axis: str
    following: SplitPropagation = field(init=False)
    alike: dict[Key, tuple[IRNode, Split | Terms | None]] = field(default_factory=dict)
    held: dict[Part, set[Held]] = field(default_factory=dict)
    kept: dict[int, Split | Terms | None] = field(default_factory=dict)
    """By node id: what is done as in the step, units included."""

    def __post_init__(self) -> None:
        self.following = SplitPropagation(self.graph, 1, Annotations(self.graph))
        nodes = self.step.nodes[: len(self.assigned)]
        keys = node_keys(self.step, nodes)
        for key, node, assignment in zip(keys, nodes, self.assigned, strict=True):
            if self.axis in assignment.mesh.axes:
                split = assignment.splits[assignment.mesh.axes.index(self.axis)]
                self.alike[key] = node, split
                self._note_held(node, split)

    def _note_held(self, node: IRNode, split: Split | Terms | None) -> None:
        """Note how the stored values lie that a node of the step reads."""
        carries, unit = [WHOLE] * len(node.inputs), 1
        if isinstance(split, Split):
            bound = dimop_of(self.step, node)
            assert bound is not None, "a node that is split has an annotation"
            carries, unit = [_sharded(c) for c in bound.flow(split.identifier).inputs], split.unit
        for value_id, carry in zip(node.inputs, carries, strict=True):
            lies = None if carry.dim is None else (carry.dim, carry.unit * unit)
            for part in parts_of(self.step.values[value_id]):
                self.held.setdefault(part, set()).add(lies)

    def run(self) -> list[Split | Terms | None]:
        """The split of each node of the graph."""
        for node, key, mesh in zip(
            self.graph.nodes, node_keys(self.graph, self.graph.nodes), self.meshes, strict=True
        ):
            self.following.size = _size(mesh, self.axis)
            if self.following.size == 1:
                self.following.keep_whole(node)
            elif not self._as_in_step(node, key):
                self._go_on(node)
        return [
            self.kept.get(node.id, split)
            for node, split in zip(self.graph.nodes, self.following.splits(), strict=True)
        ]

    def _as_in_step(self, node: IRNode, key: Key) -> bool:
        """Do with a node what the step does with its like; whether there is one that fits."""
        like, split = self.alike.get(key, (None, None))
        bound = self.following.bound(node)
        if like is None or (bound is None and split is not None):
            return False
        if isinstance(split, Split):
            assert bound is not None
            if not self._same_length(bound, like, split):
                return self._in_other_units(node, bound, split.identifier)
        elif isinstance(split, Terms) and not self._has_terms(node, bound, split):
            return False
        self._keep(node, bound, split)
        return True

    def _has_terms(self, node: IRNode, bound: BoundDimop | None, split: Terms) -> bool:
        """Whether what a node reads lies as terms that it can go on with."""
        return bound is not None and self.following.linear(node, bound) == split

    def _in_other_units(self, node: IRNode, bound: BoundDimop, identifier: str) -> bool:
        """Split a node by an identifier, where it is long enough and stored values lie so."""
        fits = self.following.fits(node, bound, identifier)
        if not fits or not self._reads_right(node, bound, identifier):
            return False
        self._split_by(node, bound, identifier)
        return True

    def _same_length(self, bound: BoundDimop, like: IRNode, split: Split) -> bool:
        """Whether what a node of the step is split by is as long in a call of this graph."""
        there = dimop_of(self.step, like)
        assert there is not None, "a node that is split has an annotation"
        name = split.identifier
        return name in bound.identifiers and bound.length(name) == there.length(name)

    def _keep(self, node: IRNode, bound: BoundDimop | None, split: Split | Terms | None) -> None:
        """Do with a node exactly this, and lead what reads it on in the same units."""
        following = self.following
        self.kept[node.id] = split
        if isinstance(split, Terms):
            following.keep_terms(node, split)
        elif split is None or bound is None:
            following.keep_whole(node)
        else:
            following.split(node, bound, split.identifier)
            region = following.region(following.chosen[node.id][1])
            units = bound.length(split.identifier) // split.unit
            following.lengths[region] = math.gcd(following.lengths[region], units)

    def _go_on(self, node: IRNode) -> None:
        """Split a node by what it reads, stored values as the step holds them."""
        following, bound = self.following, self.following.bound(node)
        if bound is None:
            following.keep_whole(node)
        elif (identifier := self._identifier(node, bound)) is not None:
            self._split_by(node, bound, identifier)
        elif (terms := following.linear(node, bound)) is not None:
            following.keep_terms(node, terms)
        else:
            following.keep_whole(node)

    def _split_by(self, node: IRNode, bound: BoundDimop, identifier: str) -> None:
        """Split a node, in the units of the stored values that it reads."""
        unit = self._stored_unit(node, bound, identifier)
        if unit is None:
            self.following.split(node, bound, identifier)
        else:
            self._keep(node, bound, Split(identifier, unit))

    def _identifier(self, node: IRNode, bound: BoundDimop) -> str | None:
        """What reads stored values as they lie, else what moves fewer bytes than gathering."""
        following = self.following
        fitting = [i for i in bound.identifiers if following.fits(node, bound, i)]
        right = [i for i in fitting if self._reads_right(node, bound, i)]
        if right and not self._reads_right(node, bound, None):
            return min(right, key=lambda i: following.cost(node, bound.flow(i)))
        choice = following.onward(node, bound)
        if choice is None or choice.identifier not in right:
            return None
        return choice.identifier if choice.bytes <= following.cost(node, None) else None

    def _reads_right(self, node: IRNode, bound: BoundDimop, identifier: str | None) -> bool:
        """Whether a split, or none, reads every stored value as the step holds it."""
        for held, carry in self._stored(node, bound, identifier):
            dims = {None if lies is None else lies[0] for lies in held}
            if carry.dim not in dims:
                return False
        return True

    def _stored_unit(self, node: IRNode, bound: BoundDimop, identifier: str) -> int | None:
        """The unit of a split that cuts stored values where the step does."""
        for held, carry in self._stored(node, bound, identifier):
            for lies in held:
                if lies is not None and lies[0] == carry.dim and lies[1] % carry.unit == 0:
                    return lies[1] // carry.unit
        return None

    def _stored(
        self, node: IRNode, bound: BoundDimop, identifier: str | None
    ) -> Iterator[tuple[set[Held], Carry]]:
        """How the step holds each stored value that a node reads, and how a split reads it."""
        carries = [WHOLE] * len(node.inputs)
        if identifier is not None:
            carries = [_sharded(carry) for carry in bound.flow(identifier).inputs]
        for value_id, carry in zip(node.inputs, carries, strict=True):
            for part in parts_of(self.graph.values[value_id])[:1]:
                if part in self.held:
                    yield self.held[part], carry


def _sharded(carry: Carry) -> Carry:
    """A carry as a shard or whole: what is not split is held whole."""
    return carry if carry.kind == "shard" else WHOLE
