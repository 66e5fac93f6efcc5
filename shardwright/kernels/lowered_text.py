"""A lowered graph as text: one call a line, what it reads and makes, without places in memory.

    lowered mlp: 2 calls
      0 gemm(%x, %w, -, -) -> %linear  transpose_b=1
      1 relu(%linear) -> %relu

A call alone has its values' numbers in the place of names. Behind the attributes stand the call's
own constraints and hints, and what it saves. What always holds: attributes that have their kind's
defaults are left out; a call that its kind cannot read is shown by its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shardwright.errors import ExecError
from shardwright.ir.tensor_meta import count_text
from shardwright.kernels.kinds import kind_of

if TYPE_CHECKING:
    from shardwright.kernels.lowered import LoweredGraph, LoweredOp

_SHOWN = 80
"""How many characters of a text attribute are shown."""


def format_lowered(graph: LoweredGraph) -> str:
    """A lowered graph's text."""
    lines = [f"lowered {graph.name}: {count_text(len(graph.ops), 'call')}"]
    for index, op in enumerate(graph.ops):
        lines.append(f"  {index} {_call(op, lambda vid: graph.values[vid].name)}")
    return "\n".join(lines)


def format_call(op: LoweredOp) -> str:
    """A call's text."""
    return _call(op, str)


def shown_attributes(op: LoweredOp) -> list[str]:
    """What differs from the kind's defaults. Raises ExecError where the kind cannot read it."""
    kind = kind_of(op.kind_id)
    attrs = kind.unpack(op.attr_schema, op.attr_blob)
    shown = []
    for name, value in attrs.items():
        if name not in kind.defaults or kind.defaults[name] != value:
            text = f"{name}={value if isinstance(value, str) else repr(value)}"
            shown.append(text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}...")
    return shown


def shown_wishes(op: LoweredOp, name: Callable[[int], str]) -> list[str]:
    """What the call asks of the planner; ``name`` gives a value's."""
    wishes = {
        "constraints": op.constraints,
        "hints": op.hints,
        "saved": [f"%{name(vid)}" for vid in op.saved],
    }
    return [f"{wish}={', '.join(words)}" for wish, words in wishes.items() if words]


def _call(op: LoweredOp, name: Callable[[int], str]) -> str:
    def listed(vids: Sequence[int]) -> str:
        return ", ".join("-" if vid < 0 else f"%{name(vid)}" for vid in vids)

    try:
        kind, attrs = kind_of(op.kind_id).name, shown_attributes(op)
    except ExecError:
        kind, attrs = f"kind {op.kind_id}", [f"schema={op.attr_schema} blob={op.attr_blob.hex()}"]
    text = "".join(f"  {item}" for item in (*attrs, *shown_wishes(op, name)))
    return f"{kind}({listed(op.in_vids)}) -> {listed(op.out_vids)}{text}"
