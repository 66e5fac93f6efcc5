"""What is left to do for a plan when every value has its home.

Comes in: an `ExecPlan`. Goes out: one that leaves the same in every output and stored value, with
fewer calls. What always holds: homes stay, so that both plans run on the same memory.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.compiler.exec_plan import ExecPlan
from shardwright.kernels.kinds import BY_NAME
from shardwright.kernels.lowered import ABSENT, LoweredOp
from shardwright.kernels.spots import results, saved

_COPY = BY_NAME["copy"].id
_GENERIC = BY_NAME["generic"].id


def optimize_plan(plan: ExecPlan) -> ExecPlan:
    """The plan without copies onto themselves, and without calls whose results nobody reads."""
    read = {*results(plan.lowered), *saved(plan.lowered.ops)}
    kept: list[int] = []
    for number, op in reversed(list(enumerate(plan.lowered.ops))):
        if _is_needed(op, read):
            read.update(op.in_vids)
            if not _copies_itself(plan, op):
                kept.append(number)
    if len(kept) == len(plan.lowered.ops):
        return plan
    numbers = {old: new for new, old in enumerate(reversed(kept))}
    order = tuple(numbers[old] for old in plan.order if old in numbers)
    return replace(
        plan,
        lowered=replace(plan.lowered, ops=tuple(plan.lowered.ops[old] for old in numbers)),
        order=order,
    )


def _is_needed(op: LoweredOp, read: set[int]) -> bool:
    """Whether anyone reads what it makes; operators of torch may do more than that (draw)."""
    return op.kind_id == _GENERIC or any(vid in read for vid in op.out_vids if vid != ABSENT)


def _copies_itself(plan: ExecPlan, op: LoweredOp) -> bool:
    """Whether a copy's source and target are one place."""
    if op.kind_id != _COPY:
        return False
    (source,), (target,) = op.in_vids, op.out_vids
    values = plan.lowered.values
    return plan.homes[source] == plan.homes[target] and values[source].dtype == values[target].dtype
