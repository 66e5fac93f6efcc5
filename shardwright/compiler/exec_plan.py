"""ExecPlan: where every value of a lowered graph lies, and which calls run in which order.

Comes in: a `LoweredGraph`, and what the caller gives away or promises. Goes out: an `ExecPlan`.
What always holds of one: every value has a home, a place in a buffer; buffer 0 is the arena, each
other one external memory (an input, a stored value, an output that the caller owns). After all
calls have run, the home of each output holds it, and each stored value's memory its new contents.
No two values that are needed at once overlap, unless one is a view of the other. Calls stand in an
order in which what is read was made before.

Memory is shared as `inplace` decides: views lie in what they view, outputs in inputs that are read
no more, updates in what they update. Where an update cannot be made in place, a copy stands at the
end; where a result lies in memory that is written over, a copy keeps it from before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from shardwright.compiler.arena import align
from shardwright.compiler.inplace import Sharer
from shardwright.compiler.keeping import copy_back, keep_results
from shardwright.compiler.layouts import meet_layouts
from shardwright.compiler.order import Order, find_uses, hinted_order, lighter_order
from shardwright.compiler.placement import ARENA, Buffer, Home, Placement
from shardwright.errors import ExecError
from shardwright.ir.tensor_meta import count_text
from shardwright.kernels.kinds import kind_of
from shardwright.kernels.lowered import ABSENT, LoweredGraph, LoweredOp
from shardwright.kernels.lowered_text import shown_attributes, shown_wishes
from shardwright.kernels.spots import Spot, find_spots, saved


@dataclass(frozen=True)
class ExecPlan:
    """Calls on memory that is planned.

    lowered
        The graph, with the copies that the plan added; its outputs are where they are read.
    homes
        By value id.
    alias
        Output to the input (or the stored value) whose memory it took.
    renewed
        External values whose memory is written: stored values that are updated, donated inputs.
    static
        External values whose contents the caller promises not to change between runs.
    peak_bytes
        What the values in the arena take at once, at most, each in whole lines.
    order
        What is called, in turn, by number among the graph's calls: all but views, which cost
        nothing, and what makes nothing.
    work_bytes
        What kernels work in beside the values, behind them in the arena: known when calls are
        bound to kernels.
    """

    lowered: LoweredGraph
    homes: Mapping[int, Home]
    buffers: tuple[Buffer, ...]
    alias: Mapping[int, int]
    renewed: frozenset[int]
    static: frozenset[int]
    peak_bytes: int
    order: tuple[int, ...]
    work_bytes: int = 0

    @property
    def arena_bytes(self) -> int:
        """What values take in the arena."""
        return self.buffers[ARENA].nbytes

    @property
    def work_at(self) -> int:
        """Where in the arena kernels work."""
        return align(self.arena_bytes)

    @property
    def memory_bytes(self) -> int:
        """The size of the arena: values, and what kernels work in."""
        return self.work_at + self.work_bytes if self.work_bytes else self.arena_bytes

    @cached_property
    def calls(self) -> tuple[LoweredOp, ...]:
        """What is called, in order."""
        return tuple(self.lowered.ops[number] for number in self.order)

    @property
    def moved(self) -> frozenset[int]:
        """The numbers of calls that are made later than the graph has them."""
        found, last = set(), -1
        for number in self.order:
            if number < last:
                found.add(number)
            last = max(last, number)
        return frozenset(found)

    def __str__(self) -> str:
        return format_plan(self)


def make_exec_plan(
    lowered: LoweredGraph,
    *,
    donated: Mapping[int, int] | None = None,
    static: Collection[int] = (),
    outputs: Literal["arena", "caller"] = "arena",
) -> ExecPlan:
    """The plan of a lowered graph.

    ``donated`` maps inputs whose memory is given away to the outputs that are to lie there.
    ``static`` are inputs and stored values whose contents never change. With ``outputs="caller"``
    each output that is no external value has a buffer of its own.
    Raises ExecError where a promise does not fit the graph.
    """
    targets = _targets(lowered, donated or {})
    _check_static(lowered, static, targets)
    spots = find_spots(lowered.values, lowered.ops)
    graph = meet_layouts(lowered, spots)
    if graph is not lowered:
        spots = find_spots(graph.values, graph.ops)
    kept, targets = keep_results(graph, targets, spots)
    if kept is not graph:
        spots = find_spots(kept.values, kept.ops)
    planner = _Planner(kept, spots, targets, frozenset(static), outputs)
    return planner.plan()


# --- what the caller says --------------------------------------------------------------------


def _targets(lowered: LoweredGraph, donated: Mapping[int, int]) -> dict[int, int]:
    """External memory by the result that is to lie there; where that is so anyway, left out."""
    for vid, result in donated.items():
        if vid not in lowered.inputs or result not in lowered.outputs:
            raise ExecError(
                f"value {vid} is donated to {result}; an input is donated to an output, and the "
                f"inputs are {list(lowered.inputs)}, the outputs {list(lowered.outputs)}"
            )
    targets = {**lowered.updates, **donated}
    return {target: result for target, result in targets.items() if target != result}


def _check_static(
    lowered: LoweredGraph, static: Collection[int], targets: Mapping[int, int]
) -> None:
    made = {vid for op in lowered.ops for vid in op.out_vids}
    for vid in static:
        if vid not in lowered.values or vid in made or vid in targets:
            raise ExecError(
                f"value {vid} is to be static; only inputs and stored values are that no update "
                "replaces"
            )


# --- deciding -------------------------------------------------------------------------------------


class _Planner:
    """What is the same whatever the order."""

    def __init__(
        self,
        graph: LoweredGraph,
        spots: Mapping[int, Spot],
        targets: Mapping[int, int],
        static: frozenset[int],
        outputs: Literal["arena", "caller"],
    ) -> None:
        self._graph = graph
        self._spots = spots
        self._targets = targets
        self._static = static
        self._outputs: Literal["arena", "caller"] = outputs
        self._uses = find_uses(graph, spots, targets)

    def plan(self) -> ExecPlan:
        """The plan in the graph's order, or in one whose arena is smaller."""
        order = hinted_order(self._uses)
        plan, lighter = self._in_order(order), lighter_order(self._uses, order)
        if lighter == order:
            return plan
        return min(plan, self._in_order(lighter), key=lambda found: found.arena_bytes)

    def _in_order(self, order: Order) -> ExecPlan:
        graph, spots, targets = self._graph, dict(self._spots), self._targets
        ops = [graph.ops[number] for number in order]
        kept = [*graph.outputs, *targets.values(), *saved(ops)]
        sharer = Sharer(graph.values, ops, spots, kept)
        sharing = sharer.share(targets)
        copied = copy_back(graph, targets, sharing, spots)
        order = (*order, *range(len(graph.ops), len(copied.ops)))
        called = [k for k, number in enumerate(order) if _makes_something(copied, number)]
        placement = Placement(copied, spots, sharer, sharing, self._outputs)
        return ExecPlan(
            copied,
            placement.homes(),
            placement.buffers,
            sharing.alias,
            frozenset(targets),
            self._static,
            placement.arena.peak,
            tuple(order[k] for k in called),
        )


def _makes_something(graph: LoweredGraph, number: int) -> bool:
    made = (vid for vid in graph.ops[number].out_vids if vid != ABSENT)
    return any(0 not in graph.values[vid].shape for vid in made)


# --- text -----------------------------------------------------------------------------------------
#
#     plan mlp: 3 calls, arena 1.5 KB (peak 1.5 KB), 1 input, 2 stored
#       0 gemm(%x @input, %w @stored, -, -) -> %linear @0 f32[64, 128]  transpose_b=1
#       1 relu(%linear @0) -> %relu @0 f32[64, 128] in %linear
#
# A number after @ is an offset in the arena; a name is that of external memory; ``later`` marks a
# call that is made later than the graph has it. Equal plans have equal texts.


def format_plan(plan: ExecPlan) -> str:
    """The plan's text."""
    return "\n".join(_lines(plan))


def _lines(plan: ExecPlan) -> Iterator[str]:
    kinds = Counter(buffer.kind for buffer in plan.buffers[1:])
    external = "".join(f", {count} {kind}" for kind, count in kinds.items())
    arena = f"arena {format_bytes(plan.arena_bytes)} (peak {format_bytes(plan.peak_bytes)})"
    if plan.work_bytes:
        arena += f" and {format_bytes(plan.work_bytes)} to work in"
    moved = plan.moved
    calls = count_text(len(plan.calls), "call")
    later = f", {len(moved)} later" if moved else ""
    yield f"plan {plan.lowered.name}: {calls}{later}, {arena}{external}"
    for index, (number, op) in enumerate(zip(plan.order, plan.calls, strict=True)):
        ins = ", ".join(_operand(plan, vid) for vid in op.in_vids)
        outs = ", ".join(_made(plan, vid) for vid in op.out_vids)
        wishes = shown_wishes(
            op, lambda vid: f"{plan.lowered.values[vid].name} @{_place(plan, vid)}"
        )
        wishes += ["later"] * (number in moved)
        attrs = "".join(f"  {item}" for item in (*shown_attributes(op), *wishes))
        yield f"  {index} {kind_of(op.kind_id).name}({ins}) -> {outs}{attrs}"
    returned = ", ".join(_operand(plan, vid) for vid in plan.lowered.outputs)
    yield f"  return {returned or 'nothing'}"


def _operand(plan: ExecPlan, vid: int) -> str:
    if vid == ABSENT:
        return "-"
    return f"%{plan.lowered.values[vid].name} @{_place(plan, vid)}"


def _place(plan: ExecPlan, vid: int) -> str:
    home = plan.homes[vid]
    buffer = plan.buffers[home.buffer]
    if buffer.vid == ABSENT:
        return str(home.offset)
    offset = f"+{home.offset}" if home.offset else ""
    return f"{plan.lowered.values[buffer.vid].name}{offset}"


def _made(plan: ExecPlan, vid: int) -> str:
    if vid == ABSENT:
        return "-"
    spec = plan.lowered.values[vid]
    strides = "" if spec.strides is None else "{" + ", ".join(map(str, spec.strides)) + "}"
    shape = ", ".join(map(str, spec.shape))
    taken = plan.alias.get(vid)
    shared = "" if taken is None else f" in %{plan.lowered.values[taken].name}"
    return f"{_operand(plan, vid)} {spec.dtype}[{shape}]{strides}{shared}"


def format_bytes(count: int) -> str:
    """Bytes as a person reads them."""
    size = float(count)
    for unit in ("B", "KB", "MB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GB"
