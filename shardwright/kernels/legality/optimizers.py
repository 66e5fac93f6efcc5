"""Rules of optimizers and counters, which renew lists of tensors.

How a parameter lies, and its gradient and state, is the planner's (`constraints`: ``alike``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from shardwright.kernels.legality.call import (
    FLOATS,
    Call,
    Makes,
    Operand,
    Rule,
    flag,
    holds,
    like,
    need,
)

List = list[Operand | None]
COUNTS = {"i64", "i32", "i16", "i8"}
"""The dtypes of whole counters."""


def _lists(call: Call) -> dict[str, List]:
    """The lists of inputs by name."""
    names = [name.rstrip("…") for name in call.kind.names(0)[: call.kind.lists]]
    count = len(call.inputs) // call.kind.lists
    return {name: list(call.inputs[k * count : (k + 1) * count]) for k, name in enumerate(names)}


def _updating(call: Call, wanted: Mapping[str, bool]) -> Makes:
    """The lists that are renewed; those of ``wanted`` are there where it says so."""
    lists = _lists(call)
    for k, parameter in enumerate(lists["params"]):
        need(parameter is not None, f"params[{k}] is absent", "a tensor")
        for name, is_wanted in wanted.items():
            _check_state(f"{name}[{k}]", lists[name][k], parameter, is_wanted)
    for k, counter in enumerate(lists.get("steps", ())):
        _check_number(f"steps[{k}]", counter)
    _check_number("lr", call.inputs[-1])
    names = list(lists)
    return _renewed(call, [old for place in call.kind.written for old in lists[names[place]]])


def _renewed(call: Call, olds: List) -> Makes:
    """What these operands become: there is an output for each."""
    for k, (old, new) in enumerate(zip(olds, call.outputs, strict=True)):
        need(old is None or new is not None, f"output {k} is absent", f"what {old} becomes")
    return [[like(old)] if old is not None else [] for old in olds]


def _check_state(name: str, found: Operand | None, parameter: Operand | None, wanted: bool) -> None:
    """A gradient, or a state, is there where it is wanted, and is of the parameter's shape."""
    need((found is not None) == wanted, f"{name} is {found}", "a tensor" if wanted else "none")
    if found is not None and parameter is not None:
        alike = found[:2] == parameter[:2] and found.dtype in FLOATS
        need(alike, f"{name} is {found}", f"floats as the parameter, {parameter}")


def _check_number(name: str, found: Operand | None) -> None:
    fits = found is not None and found.dtype in FLOATS and math.prod(found.shape) == 1
    need(fits, f"{name} is {found}", "one floating-point number")


def _sgd(call: Call) -> Makes:
    flag(call, "nesterov", "maximize")
    keeps = call.attrs["momentum"] != 0
    return _updating(call, {"params": True, "grads": True, "momentums": keeps})


def _adam(call: Call) -> Makes:
    largest, _ = flag(call, "amsgrad", "maximize")
    each = dict.fromkeys(("params", "grads", "averages", "squares"), True)
    return _updating(call, {**each, "largest": largest})


def _step_inc(call: Call) -> Makes:
    by, dtypes = call.attrs["by"], {counter.dtype for counter in call.present}
    need(
        len(call.present) == len(call.inputs)
        and all(math.prod(counter.shape) == 1 for counter in call.present)
        and len(dtypes) == 1
        and dtypes <= {*FLOATS, *COUNTS},
        f"it counts {', '.join(map(str, call.inputs))}",
        "numbers of one dtype, each alone, none of them absent",
    )
    if dtypes <= COUNTS:
        whole = math.isfinite(by) and by == int(by)
        need(whole, f"by={by} of {', '.join(dtypes)}", "a whole number")
        holds(call, "by", *dtypes)
    return _renewed(call, list(call.inputs))


TABLE: Mapping[str, Rule] = {"sgd": _sgd, "adam": _adam, "adamw": _adam, "step_inc": _step_inc}
