"""The pipeline policy: contiguous stages of balanced work and memory.

The cut is made in the flat sequence of nodes, never in the tree of modules, so that skip
connections, tied weights and values used by several stages need no special case: what a stage does
not have is sent to it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from shardwright.autodiff.needed import needing_gradients, trained_parameters
from shardwright.clusters import Mesh
from shardwright.costs.roofline import (
    ELEMENTS,
    FORMULAS,
    FREE,
    LOOKUP,
    STATE_PASSES,
    TABLE_PASSES,
    UPDATE_PASSES,
    arithmetic,
)
from shardwright.errors import PlanError
from shardwright.ir import IRGraph, IRNode
from shardwright.ir.repeats import crossing_bytes
from shardwright.ops.catalog import dimop_of
from shardwright.planning.plan import Assignment, Split, label_of
from shardwright.planning.stages import (
    Table,
    cuts_within,
    least_crossed,
    smallest_bound,
    stored_between,
    work_between,
)
from shardwright.planning.step import PreparedStep
from shardwright.planning.step_graph import state_bytes
from shardwright.planning.workload import StoredValue, Workload

# --- work -----------------------------------------------------------------------------------------
#
# Work is in floating-point operations, a multiply and an add being two, estimated from shapes
# alone. Contractions have theirs; every other operator counts as the bytes that it reads and
# writes, each worth `WORK_PER_BYTE` operations, since moving them takes the time. Seconds are in
# `costs.cost`.


WORK_PER_BYTE = 4
"""Operations a core does in the time in which it moves a byte; a CPU core does 3 to 10."""


def node_work(graph: IRGraph, node: IRNode) -> int:
    """Estimated floating-point operations of a node, memory traffic counted as such."""
    if node.op in FREE:
        return 0
    found = arithmetic(graph, node)
    if found is not None:
        return found
    outputs = [graph.values[value_id].nbytes for value_id in node.outputs]
    if node.op == LOOKUP:
        return 2 * WORK_PER_BYTE * outputs[0]
    return WORK_PER_BYTE * sum((*outputs, *(graph.values[v].nbytes for v in node.inputs)))


def training_work(graph: IRGraph, node: IRNode, needing: Collection[int]) -> int:
    """The same of a node's forward and backward, where the values ``needing`` want gradients.

    A backward takes as much as the forward again for each matrix of a contraction that needs a
    gradient, and once for what is no contraction, but for what `ELEMENTS` knows better.
    """
    wanted = [graph.values[v] for v in node.inputs if v in needing]
    once = node_work(graph, node)
    if not wanted:
        return once
    if node.op in FORMULAS:
        return once * (1 + sum(len(value.shape) > 1 for value in wanted))
    if node.op == LOOKUP:
        return once + WORK_PER_BYTE * TABLE_PASSES * wanted[0].nbytes
    if node.op in ELEMENTS:
        return ELEMENTS[node.op] * graph.values[node.inputs[0]].numel
    return 2 * once


# --- balance --------------------------------------------------------------------------------------
#
# A stage's load is the larger of its share of the work and its share of the stored bytes, of the
# whole graph's, so that no stage is the slowest or the fullest by far. The largest load of a stage
# is as small as can be, up to `SLACK`; of the cuts that keep to that, the fewest bytes cross.


SLACK = 1.05
"""A cut may exceed the smallest largest load by this factor where fewer bytes cross."""


@dataclass(frozen=True, slots=True)
class Loads:
    """What nodes carry, their work in place of seconds, and the totals of the whole graph.

    ``extra`` are bytes that every stage holds whatever its nodes are; ``fullness`` is how much a
    share of the stored bytes counts against one of the work.
    """

    nodes: Workload
    total_work: int
    total_bytes: int
    extra: int = 0
    fullness: float = 1.0

    def after(self, first: int) -> Loads:
        """The same without the first nodes."""
        work, shifted = self.nodes.seconds[first:], []
        for value in self.nodes.stored:
            if readers := tuple(at - first for at in value.readers if at >= first):
                shifted.append(value._replace(readers=readers))
        return replace(self, nodes=Workload(self.nodes.names[first:], work, stored=tuple(shifted)))

    def table(self, places: Sequence[int]) -> Table:
        """The load of the stage between two places; infinite where there is none."""
        stored = stored_between(self.nodes, places) + self.extra
        shares = self.fullness * stored / self.total_bytes
        return np.maximum(work_between(self.nodes, places) / self.total_work, shares)


def measure_loads(
    graph: IRGraph,
    work: Sequence[int] | None = None,
    held: Mapping[int, int] | None = None,
    fullness: float = 1.0,
) -> Loads:
    """Work, and stored bytes, of every node of a graph.

    ``work`` is that of each node, its forward's by default. ``held`` says what stands for the bytes
    of stored values of which that is not their own.
    """
    work = [node_work(graph, node) for node in graph.nodes] if work is None else work
    position = {node.id: i for i, node in enumerate(graph.nodes)}
    stored = tuple(
        StoredValue(
            tuple(position[user] for user in value.users), (held or {}).get(value.id, value.nbytes)
        )
        for value in graph.stored()
        if value.users
    )
    nodes = Workload(tuple(map(label_of, graph.nodes)), tuple(work), stored=stored)
    total = sum(value.nbytes for value in stored)
    return Loads(nodes, max(sum(work), 1), max(total, 1), fullness=fullness)


def stage_bounds(
    graph: IRGraph, loads: Loads, stages: int, *, first: int = 0, slack: float = SLACK
) -> list[int]:
    """Where stages begin, and where the last one ends; ``first`` nodes are in none of them.

    The largest load may exceed the smallest that there can be by the factor ``slack``. Raises
    PlanError where there are fewer nodes than stages.
    """
    check_stages(len(graph.nodes) - first, stages, graph.name)
    found = cut(loads.after(first), stages, crossing_bytes(graph)[first:], slack)
    return [first + position for position in found]


def cut(loads: Loads, stages: int, crossing: Sequence[int], slack: float = SLACK) -> list[int]:
    """Positions at which stages begin and end; ``crossing`` are the bytes that cross each."""
    bytes_crossing = np.array(crossing, dtype=np.float64)
    places = least_crossed(bytes_crossing, stages)
    costs = [loads.table(places)] * stages
    sent = np.broadcast_to(bytes_crossing[places, None], costs[0].shape)
    return [places[at] for at in cuts_within(costs, sent, smallest_bound(costs) * slack)]


# --- what a step takes ----------------------------------------------------------------------------
#
# The update counts with the first node that reads a parameter.


FULLNESS = 0.7
"""A stage may hold 1 / FULLNESS times its share of the bytes before that counts."""


def measure_training(step: PreparedStep, forward: IRGraph, microbatches: int) -> Loads:
    """Work of a microbatch and stored bytes of every forward node of a step."""
    work = measure_work(step, forward, microbatches)
    return measure_loads(forward, work, held_bytes(step.graph), FULLNESS)


def measure_work(step: PreparedStep, forward: IRGraph, microbatches: int) -> list[int]:
    """Work of a microbatch of every forward node of a step."""
    trained = trained_parameters(step.graph)
    needing = needing_gradients(forward, trained)
    states = state_bytes(step.graph)
    moved = {
        v: UPDATE_PASSES * forward.values[v].nbytes + STATE_PASSES * states.get(v, 0)
        for v in trained
        if v in forward.values
    }
    seen: set[int] = set()
    work = []
    for node in forward.nodes:
        new = {v for v in node.inputs if v in trained} - seen
        seen |= new
        update = WORK_PER_BYTE * sum(moved[v] for v in new) / microbatches
        work.append(training_work(forward, node, needing) + round(update))
    return work


def held_bytes(graph: IRGraph) -> dict[int, int]:
    """What a slot holds of each parameter that a step trains: itself, its gradient, its state."""
    states = state_bytes(graph)
    return {v: 2 * graph.values[v].nbytes + states.get(v, 0) for v in trained_parameters(graph)}


# --- the policy -----------------------------------------------------------------------------------


TABLE_SHARE = 0.1
"""A lookup table is worth cutting from this share of all stored bytes on."""
TABLE_GAIN = 1.1
"""...and where the largest load without the cut is at least this much larger."""


def pipeline(graph: IRGraph, devices: Sequence[str]) -> tuple[list[Assignment], list[str]]:
    """The assignment of each node to one of ``devices``, and notes.

    The largest share of the work or of the stored bytes that any stage carries is as small as
    possible. Raises PlanError where there are more stages than nodes.
    """
    count = len(devices)
    loads = measure_loads(graph)
    tables, notes = _choose_tables(graph, loads, count)
    bounds = stage_bounds(graph, _without_tables(graph, loads, tables, count), count)
    assigned = [
        Assignment.on(device)
        for device, (start, stop) in zip(devices, pairwise(bounds), strict=True)
        for _ in range(start, stop)
    ]
    for position in tables:
        assigned[position] = cut_table(graph, position, devices)
    return assigned, notes


def check_stages(nodes: int, stages: int, graph: str, chunks: int = 1) -> None:
    """Raise PlanError where there are fewer nodes than stages, of which a rank has ``chunks``."""
    if type(stages) is not int or stages < 1:
        raise PlanError(f"a partition has 1 stage or more, found {stages!r}")
    if not nodes:
        raise PlanError(f"the graph {graph!r} has no nodes: there is nothing to plan")
    if stages > nodes:
        found = f"{stages} stages" if chunks == 1 else f"{stages} stages, {chunks} a pipeline rank"
        most = f"{nodes} stages" if chunks == 1 else f"{nodes // chunks} pipeline ranks"
        fix = f"ask for at most {most}" if nodes >= chunks else "take a policy of one stage a rank"
        raise PlanError(f"{found}, but the graph {graph!r} has only {nodes} nodes; {fix}")


def _choose_tables(graph: IRGraph, loads: Loads, devices: int) -> tuple[list[int], list[str]]:
    """Lookup tables to cut: those without which the stages balance clearly better."""
    tables = find_tables(graph, devices, TABLE_SHARE) if devices > 1 else []
    if not tables:
        return [], []
    places = least_crossed(np.array(crossing_bytes(graph)), devices)
    without = _without_tables(graph, loads, tables, devices)
    whole, split = (smallest_bound([each.table(places)] * devices) for each in (loads, without))
    if whole < split * TABLE_GAIN:
        return [], []
    names = ", ".join(graph.values[graph.nodes[position].inputs[0]].names[0] for position in tables)
    return tables, [
        f"cut by columns over all {devices} slots: {names} (the fullest stage then carries "
        f"{100 * split:.0f}% of the whole, otherwise {100 * whole:.0f}%)"
    ]


def _without_tables(graph: IRGraph, loads: Loads, tables: Sequence[int], devices: int) -> Loads:
    """Loads in which the tables' bytes lie evenly on all stages."""
    readers = {(position,) for position in tables}
    moved = sum(graph.values[graph.nodes[position].inputs[0]].nbytes for position in tables)
    stored = tuple(value for value in loads.nodes.stored if value.readers not in readers)
    return replace(loads, nodes=replace(loads.nodes, stored=stored), extra=-(-moved // devices))


# --- embedding tables -----------------------------------------------------------------------------
#
# An embedding is memory, not work: half of a small language model's bytes may lie in one table that
# does nothing but hand out rows. Left whole, the slot that has it is full before it has work to do.
# Cut by columns, each slot holds a part and looks up its columns of every row; the parts are joined
# where the table's rows are wanted. The result is the same to the last bit.


def find_tables(graph: IRGraph, parts: int, at_least: float) -> list[int]:
    """Positions of lookups whose table may be cut in ``parts`` and has the given share of bytes.

    A table that anything but one lookup reads (an output layer tied to it, say) stays whole.
    """
    total = sum(value.nbytes for value in graph.stored() if value.users) or 1
    found = []
    for position, node in enumerate(graph.nodes):
        if node.op == LOOKUP:
            table = graph.values[node.inputs[0]]
            alone = table.is_stored and len(table.users) == 1 and table.id not in graph.outputs
            large = table.nbytes >= at_least * total and table.shape[1] >= parts
            if alone and large and table.id not in graph.updates:
                found.append(position)
    return found


def cut_table(graph: IRGraph, position: int, devices: Sequence[str]) -> Assignment:
    """The assignment of the lookup at a position that gives each slot some columns."""
    bound = dimop_of(graph, graph.nodes[position])
    assert bound is not None
    mesh = Mesh(("table",), (len(devices),), tuple(devices))
    return Assignment(mesh, (Split(bound.identifier(0, 1)),))
