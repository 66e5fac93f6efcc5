"""Which of several calls under way a slot moves next, in a pipeline without training.

Each call has a place in the slot's steps. Steps up to the last that gives something to another slot
go first, since somebody may be waiting for it; else the oldest call does. No call comes up to the
one before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.engine.slot_steps import SlotStep


def call_order(places: Sequence[int], steps: int, last_given: int, *, serial: bool) -> list[int]:
    """The calls that may move, in the order to try them: indices of ``places``, oldest first.

    ``last_given`` is what `last_given` says of the slot's ``steps``; with ``serial`` one call ends
    before the next starts.
    """
    if serial:
        return [k for k in range(len(places))[:1] if places[k] < steps]
    limit, found = steps, []
    for k, place in enumerate(places):
        if place < limit:
            found.append(k)
        limit = min(limit, place)
    found.sort(key=lambda k: places[k] >= last_given)
    return found


def last_given(steps: Sequence[SlotStep]) -> int:
    """Up to which place, itself left out, a slot still gives something to another."""
    gives = [i for i, step in enumerate(steps) if step.communicates and step.inputs]
    return gives[-1] + 1 if gives else 0
