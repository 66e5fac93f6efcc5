"""Rows of operators that make tensors from nothing: every dimension of the result splits.

    zeros, (2, 12)    -> a b
    arange, 10        -> a        a part's numbers start where the part does
    new_zeros, (4,)   ? -> a      of the input only the dtype is read

Random numbers have no row: parts would draw others than the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.ops.call import (
    CatalogCall,
    Emitter,
    Inputs,
    Local,
    OperatorRow,
    Rule,
    named,
    table,
    text,
)


def sized(call: CatalogCall) -> Rule:
    """The same value everywhere: a part has its own sizes."""
    full = call.outputs[0]
    names = named(full)
    return Rule(
        text(["?"] * len(call.inputs), [names]),
        lengths={name: size for name, size in zip(names, full, strict=True) if name != "1"},
        attrs=lambda local: {"size": local.size()},
    )


def arange(call: CatalogCall) -> Rule:
    """Evenly spaced numbers."""
    (length,) = call.outputs[0]
    if length < 2:
        return Rule(text([], [[str(length)]]))
    return Rule("-> n", lengths={"n": length}, emit=arange_part)


def arange_part(e: Emitter, local: Local, inputs: Inputs) -> Any:
    """The numbers from the part's first position on, as many as it has."""
    if "n" not in local.cuts:
        return None
    attrs = local.call.attrs
    start, step = attrs.get("start", 0), attrs.get("step", 1)
    if attrs["dtype"] is None and any(isinstance(attrs.get(k), float) for k in _BOUNDS):
        start = float(start)
    bounds = {
        "start": start + step * local.cuts["n"].start,
        "end": start + step * local.cuts["n"].end,
        "step": step,
    }
    return e.emit("aten.arange.start_step", inputs, {**attrs, **bounds})


_BOUNDS = ("start", "end", "step")


ROWS: Mapping[str, OperatorRow] = {
    **table(sized, "zeros ones full empty.memory_format"),
    **table(sized, "new_zeros new_ones new_full new_empty", reads="shape"),
    **table(arange, "arange arange.start arange.start_step"),
    **table(lambda call: Rule("-> ()"), "scalar_tensor"),
}
