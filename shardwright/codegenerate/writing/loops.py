"""Chains of calls as loops.

Comes in: the steps of a forward, calls of modules among them. Goes out: the same with each chain
of calls of equal modules as one `Loop`. What always holds: in a chain
each call's one result is read by the next call alone, as the same argument, and all other arguments
are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.codegenerate.spelling.literals import quoted
from shardwright.codegenerate.writing.names import item_name
from shardwright.codegenerate.writing.step import Loop, ModuleCall

SHORTEST = 2
"""Calls; fewer are no loop."""


def chains(
    calls: Sequence[ModuleCall | None], uses: Mapping[int, int]
) -> list[tuple[int, int, int]]:
    """Start, stop and carried argument of each chain; ``uses`` counts how often values are read.

    ``calls`` has None where a step is none of a module that stands beside others.
    """
    found = []
    start = 0
    while start < len(calls):
        stop, carried = _longest(calls, start, uses)
        if stop - start >= SHORTEST:
            found.append((start, stop, carried))
        start = max(stop, start + 1)
    return found


def _longest(
    calls: Sequence[ModuleCall | None], start: int, uses: Mapping[int, int]
) -> tuple[int, int]:
    """Where the chain ends that begins at ``start``, and which argument is carried."""
    first = calls[start]
    carried = -1
    stop = start + 1
    while first is not None and stop < len(calls):
        before, here = calls[stop - 1], calls[stop]
        if before is None or here is None:
            break
        place = _follows(before, here, uses)
        if place is None or carried not in (-1, place):
            break
        carried, stop = place, stop + 1
    return stop, carried


def _follows(before: ModuleCall, here: ModuleCall, uses: Mapping[int, int]) -> int | None:
    """Which argument of a call is the result of the one before; None where they are no chain."""
    same = (before.container, before.constructor) == (here.container, here.constructor)
    if not same or not here.container or len(before.results) != 1 or len(here.results) != 1:
        return None
    result = before.results[0]
    if uses.get(result, 0) != 1 or result not in here.arguments:
        return None
    place = here.arguments.index(result)
    others = [
        (a, b)
        for at, (a, b) in enumerate(zip(before.arguments, here.arguments, strict=True))
        if at != place
    ]
    return place if all(a == b for a, b in others) else None


def as_loop(chain: Sequence[ModuleCall], carried: int, siblings: Sequence[str]) -> Loop:
    """A chain as a loop; ``siblings`` are the names of all that stand in the container."""
    first = chain[0]
    item = item_name(first.constructor.partition("(")[0].rpartition(".")[2])
    keys = [call.key for call in chain]
    over, callee = _over(first.container, keys, siblings, item)
    return Loop(
        over=over,
        item="i" if callee != item else item,
        callee=callee,
        arguments=first.arguments,
        carried=carried,
        last=chain[-1].results[0],
    )


def _over(
    container: str, keys: Sequence[str], siblings: Sequence[str], item: str
) -> tuple[str, str]:
    """What is iterated over, and what is called in each turn."""
    if list(keys) == list(siblings):
        return f"{container}.values()", item
    numbers = number_range(keys)
    if numbers is not None:
        return numbers, f"{container}[str(i)]"
    return f"({', '.join(quoted(key) for key in keys)})", f"{container}[i]"


def number_range(keys: Sequence[str]) -> str | None:
    """``range(2, 6)`` for "2" to "5"; None where the keys are no such numbers."""
    if not all(key.isascii() and key.isdigit() and str(int(key)) == key for key in keys):
        return None
    start, stop = int(keys[0]), int(keys[-1]) + 1
    if [int(key) for key in keys] != list(range(start, stop)):
        return None
    return f"range({start}, {stop})" if start else f"range({stop})"
