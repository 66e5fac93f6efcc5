"""ExecPlan: where every value of a lowered graph is, and which calls run in which order.

    plan mlp: 3 calls, arena 1.5 KB (peak 1.5 KB), 1 input, 2 stored
      0 gemm(%x @input, %w @stored, -, -) -> %linear @0 f32[64, 128]  transpose_b=1
      1 relu(%linear @0) -> %relu @0 f32[64, 128] in %linear

Every value has an allocation, a place in a buffer; buffer 0 is the arena, each other one external
memory (an input, a stored value, an output that the caller owns). After all calls have run, the
allocation of each output holds it, and each stored value's memory its new contents. No two values
that are needed at once overlap, unless one is a view of the other.

In a plan's text a number after @ is an offset in the arena; a name is that of external memory;
``later`` marks a call that is made later than the graph has it. Equal plans have equal texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from shardwright.compiler.memory.arena import LiveRange, align, make_arena
from shardwright.compiler.memory.reuse import (
    COPY,
    MemoryReuse,
    copy_back,
    keep_results,
    legalize_layouts,
)
from shardwright.compiler.memory.schedule import CallOrder, find_uses, hinted_order, lighter_order
from shardwright.errors import ExecError
from shardwright.ir.tensor_meta import count_text, itemsize
from shardwright.kernels.lowered import (
    BY_NAME,
    BaseView,
    LoweredGraph,
    LoweredOp,
    find_bases,
    format_attributes,
    format_constraints,
    kind_of,
)
from shardwright.kernels.row import ABSENT

ARENA = 0
"""The arena's number among the buffers."""

BufferKind = Literal["arena", "input", "stored", "output"]
OutputMemory = Literal["arena", "caller"]


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory with an address of its own; ``vid`` is the value that it is, ABSENT for the arena."""

    kind: BufferKind
    vid: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """Where a value is: bytes from its buffer's begin, strides in elements."""

    buffer: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class ExecPlan:
    """Calls on memory that is planned.

    lowered
        The graph, with the copies that the plan added; its outputs are where they are read.
    allocations
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
    allocations: Mapping[int, Allocation]
    buffers: tuple[Buffer, ...]
    alias: Mapping[int, int]
    renewed: frozenset[int]
    static: frozenset[int]
    peak_bytes: int
    order: CallOrder
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
        return "\n".join(_lines(self))


# --- planning ------------------------------------------------------------------------------------


def make_exec_plan(
    lowered: LoweredGraph,
    *,
    donated: Mapping[int, int] | None = None,
    static: Collection[int] = (),
    outputs: OutputMemory = "arena",
) -> ExecPlan:
    """The plan of a lowered graph: in its own order, or in one whose arena is smaller.

    ``donated`` maps inputs whose memory is given away to the outputs that are to be there.
    ``static`` are inputs and stored values whose contents never change. With ``outputs="caller"``
    each output that is no external value has a buffer of its own.
    Raises ExecError where a promise does not fit the graph.
    """
    targets = _targets(lowered, donated or {})
    _check_static(lowered, static, targets)
    bases = find_bases(lowered.values, lowered.ops)
    if (graph := legalize_layouts(lowered, bases)) is not lowered:
        bases = find_bases(graph.values, graph.ops)
    kept, targets = keep_results(graph, targets, bases)
    if kept is not graph:
        graph, bases = kept, find_bases(kept.values, kept.ops)
    uses = find_uses(graph, bases, targets)
    order = hinted_order(uses)
    plan = _plan_in_order(graph, bases, targets, static, outputs, order)
    if (lighter := lighter_order(uses, order)) == order:
        return plan
    other = _plan_in_order(graph, bases, targets, static, outputs, lighter)
    return min(plan, other, key=lambda found: found.arena_bytes)


def _targets(lowered: LoweredGraph, donated: Mapping[int, int]) -> dict[int, int]:
    """External memory by the result that is to be there; where that is so anyway, left out."""
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


def _plan_in_order(
    graph: LoweredGraph,
    graph_bases: Mapping[int, BaseView],
    targets: Mapping[int, int],
    static: Collection[int],
    outputs: OutputMemory,
    order: CallOrder,
) -> ExecPlan:
    bases, ops = dict(graph_bases), [graph.ops[number] for number in order]
    reuse = MemoryReuse(graph.values, ops, bases, [*graph.kept, *targets.values()], targets)
    copied = copy_back(graph, targets, reuse, bases)
    order = (*order, *range(len(graph.ops), len(copied.ops)))
    values, owner = copied.values, reuse.owner
    stored = _stored(copied, reuse)
    owners = dict.fromkeys(owner[bases[vid].base] for vid in copied.outputs)
    owned = [vid for vid in owners if vid in reuse.first] if outputs == "caller" else []
    lives = _live_ranges(copied, reuse, {*copied.inputs, *stored, *owned})
    arena = make_arena(list(lives.values()))
    buffers = (
        Buffer("arena", ABSENT, arena.size),
        *(Buffer("input", vid, values[vid].nbytes) for vid in copied.inputs),
        *(Buffer("stored", vid, values[vid].nbytes) for vid in stored),
        *(Buffer("output", vid, values[vid].nbytes) for vid in owned),
    )
    places = {buffer.vid: (k, 0) for k, buffer in enumerate(buffers) if k != ARENA}
    places |= {base: (ARENA, at) for base, at in zip(lives, arena.offsets, strict=True)}
    allocations = {}
    for vid, view in bases.items():
        if (place := places.get(owner[view.base])) is not None:
            offset = place[1] + view.offset * itemsize(values[vid].dtype)
            allocations[vid] = Allocation(place[0], offset, view.shape, view.strides)
    return ExecPlan(
        copied,
        allocations,
        buffers,
        reuse.alias,
        frozenset(targets),
        frozenset(static),
        arena.peak,
        tuple(k for k in order if any(0 not in values[v].shape for v in copied.ops[k].makes)),
    )


def _stored(graph: LoweredGraph, reuse: MemoryReuse) -> list[int]:
    """Stored values that are read, returned or written."""
    inputs = set(graph.inputs)
    return [
        vid
        for vid in graph.values
        if vid not in reuse.first
        and vid not in inputs
        and vid in reuse.owner
        and (vid in reuse.last or vid in graph.updates)
    ]


def _live_ranges(
    graph: LoweredGraph, reuse: MemoryReuse, external: Collection[int]
) -> dict[int, LiveRange]:
    """From when to when each owner in the arena is needed."""
    ends: dict[int, int] = {}
    for base in reuse.first:
        owner = reuse.owner[base]
        if owner not in external:
            ends[owner] = max(ends.get(owner, 0), reuse.last[base])
    return {
        owner: LiveRange(reuse.first[owner], end, graph.values[owner].nbytes)
        for owner, end in ends.items()
    }


# --- optimizing ----------------------------------------------------------------------------------


def optimize_plan(plan: ExecPlan) -> ExecPlan:
    """The plan without copies onto themselves, and without calls whose results nobody reads.

    Allocations stay, so that both plans run on the same memory.
    """
    read = set(plan.lowered.kept)
    kept: list[int] = []
    for number, op in reversed(list(enumerate(plan.lowered.ops))):
        # Operators of torch may do more than make what is read: they draw.
        if op.kind_id == BY_NAME["generic"].id or not read.isdisjoint(op.makes):
            read.update(op.in_vids)
            if not _copies_itself(plan, op):
                kept.append(number)
    if len(kept) == len(plan.lowered.ops):
        return plan
    numbers = {old: new for new, old in enumerate(reversed(kept))}
    return replace(
        plan,
        lowered=replace(plan.lowered, ops=tuple(plan.lowered.ops[old] for old in numbers)),
        order=tuple(numbers[old] for old in plan.order if old in numbers),
    )


def _copies_itself(plan: ExecPlan, op: LoweredOp) -> bool:
    """Whether a copy's source and target are one place."""
    if op.kind_id != COPY.id:
        return False
    (source,), (target,) = op.in_vids, op.out_vids
    same = plan.allocations[source] == plan.allocations[target]
    return same and plan.lowered.values[source].dtype == plan.lowered.values[target].dtype


# --- text ----------------------------------------------------------------------------------------


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
        words = format_constraints(
            op, lambda vid: f"{plan.lowered.values[vid].name} @{_place(plan, vid)}"
        )
        words += ["later"] * (number in moved)
        attrs = "".join(f"  {item}" for item in (*format_attributes(op), *words))
        yield f"  {index} {kind_of(op.kind_id).name}({ins}) -> {outs}{attrs}"
    returned = ", ".join(_operand(plan, vid) for vid in plan.lowered.outputs)
    yield f"  return {returned or 'nothing'}"


def _operand(plan: ExecPlan, vid: int) -> str:
    if vid == ABSENT:
        return "-"
    return f"%{plan.lowered.values[vid].name} @{_place(plan, vid)}"


def _place(plan: ExecPlan, vid: int) -> str:
    allocation = plan.allocations[vid]
    buffer = plan.buffers[allocation.buffer]
    if buffer.vid == ABSENT:
        return str(allocation.offset)
    offset = f"+{allocation.offset}" if allocation.offset else ""
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
