"""Rows of operators that make tensors from nothing: every dimension of the result splits.

    zeros, (2, 12)    -> a b
    arange, 10        -> a        a part's numbers start where the part does
    new_zeros, (4,)   ? -> a      of the input only the dtype is read

Random numbers have no row: parts would draw others than the whole.
"""

from __future__ import annotations

from typing import Any

from shardwright.ops.call import Call, Emitter, Inputs, Local, Row, Rule, named, text


def sized(attr: str = "size") -> Row:
    """A row for what has the same value everywhere: a part has its own sizes."""

    def row(call: Call) -> Rule:
        full = call.outputs[0]
        names = named(full)
        lengths = {name: size for name, size in zip(names, full, strict=True) if name != "1"}
        inputs = ["?"] * len(call.inputs)
        return Rule(
            text(inputs, [names]), lengths=lengths, attrs=lambda local: {attr: local.size()}
        )

    return row


def arange(call: Call) -> Rule:
    """Evenly spaced numbers."""
    (length,) = call.outputs[0]
    if length < 2:
        return Rule(text([], [[str(length)]]))
    return Rule("-> n", lengths={"n": length}, emit=arange_part)


def arange_part(e: Emitter, local: Local, inputs: Inputs) -> Any:
    """The numbers from the part's first place on, as many as it has."""
    attrs = dict(local.call.attrs)
    if "n" not in local.cuts:
        return e.emit(local.call.op, inputs, attrs)
    start, step = attrs.get("start", 0), attrs.get("step", 1)
    if attrs["dtype"] is None and any(isinstance(attrs.get(k), float) for k in _BOUNDS):
        start = float(start)
    bounds = {
        "start": start + step * local.cuts["n"].start,
        "end": start + step * local.cuts["n"].end,
        "step": step,
    }
    return e.emit("aten.arange.start_step", inputs, attrs | bounds)


_BOUNDS = ("start", "end", "step")


def scalar(call: Call) -> Rule:
    """A tensor without dimensions."""
    return Rule(text([], [[]]))


ROWS: dict[str, Row] = {
    **{
        f"aten.{name}": sized()
        for name in (
            "zeros.default",
            "ones.default",
            "full.default",
            "empty.memory_format",
            "new_zeros.default",
            "new_ones.default",
            "new_full.default",
            "new_empty.default",
        )
    },
    "aten.arange.default": arange,
    "aten.arange.start": arange,
    "aten.arange.start_step": arange,
    "aten.scalar_tensor.default": scalar,
}
