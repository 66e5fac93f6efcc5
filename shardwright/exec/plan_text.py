"""A plan as text: one call a line, with where each operand lies.

    plan mlp: 3 calls, arena 1.5 KB (peak 1.5 KB), 1 input, 2 stored
      0 gemm(%x @input, %w @stored, -, -) -> %linear @0 f32[64, 128]  transpose_b=1
      1 relu(%linear @0) -> %relu @0 f32[64, 128] in %linear

A number after @ is an offset in the arena; a name is that of external memory. What always holds:
equal plans have equal texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwright.exec.kinds import kind_of
from shardwright.exec.lowered import ABSENT, LoweredGraph, LoweredOp

if TYPE_CHECKING:
    from shardwright.exec.exec_plan import ExecPlan

_SHOWN = 80
"""How many characters of a text attribute are shown."""


def format_plan(plan: ExecPlan) -> str:
    """The plan's text."""
    return "\n".join(_lines(plan))


def _lines(plan: ExecPlan) -> Iterator[str]:
    kinds = Counter(buffer.kind for buffer in plan.buffers[1:])
    external = "".join(f", {count} {kind}" for kind, count in kinds.items())
    arena = f"arena {format_bytes(plan.arena_bytes)} (peak {format_bytes(plan.peak_bytes)})"
    yield f"plan {plan.lowered.name}: {len(plan.calls)} calls, {arena}{external}"
    for index, op in enumerate(plan.calls):
        ins = ", ".join(_operand(plan, vid) for vid in op.in_vids)
        outs = ", ".join(_made(plan, vid) for vid in op.out_vids)
        attrs = "".join(f"  {item}" for item in _attributes(op))
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


def _attributes(op: LoweredOp) -> list[str]:
    """What differs from the kind's defaults."""
    kind = kind_of(op.kind_id)
    attrs = kind.unpack(op.attr_schema, op.attr_blob)
    shown = []
    for name, value in attrs.items():
        if name not in kind.defaults or kind.defaults[name] != value:
            text = f"{name}={value if isinstance(value, str) else repr(value)}"
            shown.append(text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}...")
    return shown


def format_bytes(count: int) -> str:
    """Bytes as a person reads them."""
    size = float(count)
    for unit in ("B", "KB", "MB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GB"


def format_lowered(graph: LoweredGraph) -> str:
    """A lowered graph's text: its calls, without places."""
    lines = [f"lowered {graph.name}: {len(graph.ops)} calls"]
    for index, op in enumerate(graph.ops):
        ins, outs = (
            ", ".join("-" if v == ABSENT else f"%{graph.values[v].name}" for v in vids)
            for vids in (op.in_vids, op.out_vids)
        )
        attrs = "".join(f"  {item}" for item in _attributes(op))
        lines.append(f"  {index} {kind_of(op.kind_id).name}({ins}) -> {outs}{attrs}")
    return "\n".join(lines)
