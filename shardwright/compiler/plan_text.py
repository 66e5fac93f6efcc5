"""A plan as text: one call a line, with where each operand lies.

    plan mlp: 3 calls, arena 1.5 KB (peak 1.5 KB), 1 input, 2 stored
      0 gemm(%x @input, %w @stored, -, -) -> %linear @0 f32[64, 128]  transpose_b=1
      1 relu(%linear @0) -> %relu @0 f32[64, 128] in %linear

A number after @ is an offset in the arena; a name is that of external memory; ``later`` marks a
call that is made later than the graph has it. Equal plans have equal texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwright.ir.quantities import count_text
from shardwright.kernels.kinds import kind_of
from shardwright.kernels.lowered import ABSENT
from shardwright.kernels.lowered_text import shown_attributes, shown_wishes

if TYPE_CHECKING:
    from shardwright.compiler.exec_plan import ExecPlan


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
