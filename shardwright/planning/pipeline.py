"""The pipeline policy: contiguous stages of balanced work and memory.

The cut is made in the flat sequence of nodes, never in the tree of modules, so that skip
connections, tied weights and values used by several stages need no special case: what a stage does
not have is sent to it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

from shardwright.autodiff.needed import needing_gradients, trained_parameters
from shardwright.clusters import Mesh
from shardwright.costs.operations import (
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
from shardwright.planning.plan import Assignment, Split
from shardwright.planning.step import PreparedStep
from shardwright.planning.step_graph import parameters_of

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
# `Loads` says what a stage of neighbours would carry: the larger of its share of the work and its
# share of the stored bytes, of the whole graph's, so that no stage is the slowest or the fullest by
# far. `cut` minimises, first, the largest load of any stage and then, among all cuts whose stages
# stay within `SLACK` of that, the bytes that cross. A load never shrinks when a stage grows, so
# both dynamic programs take O(stages · n log n): half the time of one over tables of ranges
# (`stages`).


SLACK = 1.05
"""A cut may exceed the smallest largest load by this factor where fewer bytes cross."""


@dataclass(frozen=True, slots=True)
class Loads:
    """Prefix sums over the nodes of a graph.

    A stored value that several nodes read counts once in a stage, so those values stand apart
    from the prefix sums, with the positions that read them.
    """

    work: list[int]
    single: list[int]
    shared: list[tuple[int, list[int]]]
    total_work: int
    total_bytes: int
    extra: int = 0
    """Bytes that every stage holds whatever its nodes are."""
    fullness: float = 1.0
    """How much a share of the stored bytes counts against one of the work."""

    def after(self, first: int) -> Loads:
        """The same without the first nodes."""
        shared = [(n, [at - first for at in found if at >= first]) for n, found in self.shared]
        return replace(self, work=self.work[first:], single=self.single[first:], shared=shared)

    def stored_bytes(self, start: int, stop: int) -> int:
        """Bytes of parameters, buffers and constants that nodes start..stop-1 read."""
        found = self.single[stop] - self.single[start]
        for size, positions in self.shared:
            at = bisect_left(positions, start)
            found += size if at < len(positions) and positions[at] < stop else 0
        return found

    def load(self, start: int, stop: int) -> float:
        """The larger share, of work or of stored bytes, of nodes start..stop-1."""
        stored = self.stored_bytes(start, stop) + self.extra
        work = self.work[stop] - self.work[start]
        return max(work / self.total_work, self.fullness * stored / self.total_bytes)


def measure_loads(graph: IRGraph, held: Mapping[int, int] | None = None) -> Loads:
    """Work and stored bytes of every node of a graph.

    ``held`` says what stands for the bytes of stored values of which that is not their own.
    """
    held = held or {}
    position = {node.id: i for i, node in enumerate(graph.nodes)}
    work = list(accumulate((node_work(graph, node) for node in graph.nodes), initial=0))
    single = [0] * len(graph.nodes)
    shared = []
    for value in graph.stored():
        nbytes = held.get(value.id, value.nbytes)
        if len(value.users) == 1:
            single[position[value.users[0]]] += nbytes
        elif value.users:
            shared.append((nbytes, [position[user] for user in value.users]))
    prefix = list(accumulate(single, initial=0))
    total = prefix[-1] + sum(size for size, _ in shared)
    return Loads(work, prefix, shared, max(work[-1], 1), max(total, 1))


def cut(loads: Loads, stages: int, crossing: Sequence[int], slack: float = SLACK) -> list[int]:
    """Positions 0 = c0 < c1 < … < cN = n: stage k runs the nodes from c(k) to c(k+1)-1.

    ``crossing`` is `crossing_bytes` of the graph; the largest load may exceed the smallest that
    there can be by the factor ``slack``.
    """
    bound = smallest_bound(loads, stages) * slack
    return _fewest_bytes(loads, stages, crossing, bound)


def smallest_bound(loads: Loads, stages: int) -> float:
    """The smallest possible largest load of any stage."""
    n = len(loads.work) - 1
    best = [loads.load(0, stop) for stop in range(n + 1)]
    for stage in range(1, stages):
        best = [float("inf")] * stage + [
            _best_split(loads, best, stage, stop) for stop in range(stage, n + 1)
        ]
    return best[n]


def _best_split(loads: Loads, best: Sequence[float], stage: int, stop: int) -> float:
    """min over start of max(best[start], load(start, stop)); one rises with start, one falls."""
    low, high = stage, stop - 1
    while low < high:
        middle = (low + high) // 2
        if best[middle] >= loads.load(middle, stop):
            high = middle
        else:
            low = middle + 1
    candidates = (start for start in (low - 1, low) if stage <= start < stop)
    return min(
        (max(best[start], loads.load(start, stop)) for start in candidates),
        default=float("inf"),
    )


def _fewest_bytes(loads: Loads, stages: int, crossing: Sequence[int], bound: float) -> list[int]:
    """The cut of fewest crossing bytes whose stages all stay within ``bound``."""
    n = len(loads.work) - 1
    cost = [0.0 if loads.load(0, stop) <= bound else float("inf") for stop in range(n + 1)]
    cost[0] = float("inf")
    choices: list[list[int]] = []
    for _ in range(1, stages):
        cost, choice = _extend(cost, crossing, partial(_fits, loads, bound))
        choices.append(choice)
    cuts = [n]
    for choice in reversed(choices):
        cuts.append(choice[cuts[-1]])
    return [0, *reversed(cuts)]


def _fits(loads: Loads, bound: float, start: int, stop: int) -> bool:
    return loads.load(start, stop) <= bound


def _extend(
    cost: Sequence[float], crossing: Sequence[int], fits: Callable[[int, int], bool]
) -> tuple[list[float], list[int]]:
    """One stage more: for each stop, the cheapest start from which the stage fits.

    The starts that fit are a window that moves right with stop, so a queue with its smallest
    cost in front answers each stop in constant time.
    """
    result, choice = [float("inf")] * len(cost), [0] * len(cost)
    window: deque[tuple[float, int]] = deque()
    for stop in range(1, len(cost)):
        entering = cost[stop - 1] + crossing[stop - 1]
        while window and window[-1][0] > entering:
            window.pop()
        window.append((entering, stop - 1))
        while window and not fits(window[0][1], stop):
            window.popleft()
        if window:
            result[stop], choice[stop] = window[0]
    return result, choice


# --- what a step takes ----------------------------------------------------------------------------
#
# The update counts with the first node that reads a parameter.


FULLNESS = 0.7
"""A stage may hold 1 / FULLNESS times its share of the bytes before that counts."""


def measure_training(step: PreparedStep, forward: IRGraph, microbatches: int) -> Loads:
    """Work of a microbatch and stored bytes of every forward node of a step."""
    loads = measure_loads(forward, held_bytes(step.graph))
    total = list(accumulate(measure_work(step, forward, microbatches), initial=0))
    return Loads(
        total, loads.single, loads.shared, max(total[-1], 1), loads.total_bytes, fullness=FULLNESS
    )


def measure_work(step: PreparedStep, forward: IRGraph, microbatches: int) -> list[int]:
    """Work of a microbatch of every forward node of a step."""
    trained = trained_parameters(step.graph)
    needing = needing_gradients(forward, trained)
    moved = {v: UPDATE_PASSES * forward.values[v].nbytes for v in trained if v in forward.values}
    for value_id, parameter in parameters_of(step.graph).items():
        if step.graph.values[value_id].role == "state" and parameter in moved:
            moved[parameter] += STATE_PASSES * step.graph.values[value_id].nbytes
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
    held = {value_id: 2 * graph.values[value_id].nbytes for value_id in trained_parameters(graph)}
    for value_id, parameter in parameters_of(graph).items():
        if graph.values[value_id].role == "state" and parameter in held:
            held[parameter] += graph.values[value_id].nbytes
    return held


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


def stage_bounds(
    graph: IRGraph, loads: Loads, stages: int, *, first: int = 0, slack: float = SLACK
) -> list[int]:
    """Where stages begin, and where the last one ends; ``first`` nodes are in none of them.

    Raises PlanError where there are fewer nodes than stages.
    """
    check_stages(len(graph.nodes) - first, stages, graph.name)
    bounds = cut(loads.after(first), stages, crossing_bytes(graph)[first:], slack)
    return [first + bound for bound in bounds]


def _choose_tables(graph: IRGraph, loads: Loads, devices: int) -> tuple[list[int], list[str]]:
    """Lookup tables to cut: those without which the stages balance clearly better."""
    tables = find_tables(graph, devices, TABLE_SHARE) if devices > 1 else []
    if not tables:
        return [], []
    whole = smallest_bound(loads, devices)
    split = smallest_bound(_without_tables(graph, loads, tables, devices), devices)
    if whole < split * TABLE_GAIN:
        return [], []
    names = ", ".join(graph.values[graph.nodes[position].inputs[0]].names[0] for position in tables)
    return tables, [
        f"cut by columns over all {devices} slots: {names} (the fullest stage then carries "
        f"{100 * split:.0f}% of the whole, otherwise {100 * whole:.0f}%)"
    ]


def _without_tables(graph: IRGraph, loads: Loads, tables: Sequence[int], devices: int) -> Loads:
    """Loads in which the tables' bytes lie evenly on all stages."""
    single, moved = list(loads.single), 0
    for position in tables:
        nbytes = graph.values[graph.nodes[position].inputs[0]].nbytes
        moved += nbytes
        single[position + 1 :] = [found - nbytes for found in single[position + 1 :]]
    return replace(loads, single=single, extra=-(-moved // devices))


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
