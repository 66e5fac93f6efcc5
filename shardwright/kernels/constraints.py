"""What a call may ask of the planner, in words.

A constraint holds in every plan; a hint is followed where nothing speaks against it. A call is
under its own constraints and under those of its kind (`Kind.constrains`). What always holds: both
only take freedom from the planner, so that a wrong word costs memory or time, never a right result;
and a word that nobody knows is an error, never passed over.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shardwright.errors import ExecError
from shardwright.kernels.kinds import Kind

CONSTRAINTS: Mapping[str, str] = {
    "contiguous": "every operand is contiguous: others are copied before and after",
    "alike": "the operands of one row, a parameter and what belongs to it, are dense and ordered "
    "alike in memory; a kind without lists has one row, of all operands that are of one shape",
    "no_alias": "no result lies in an operand's memory, even if its kind lets it",
    "ordered": "calls that are ordered keep their order among one another",
}
HINTS: Mapping[str, str] = {
    "early": "the call stays where the graph has it",
    "late": "the call is made just before the first one that reads what it makes",
}


def check_wishes(
    kind: Kind, constraints: Collection[str], hints: Collection[str], where: str
) -> None:
    """Raise ExecError for a word that this version does not know, or that cannot be followed."""
    for name, words, known in (("constraint", constraints, CONSTRAINTS), ("hint", hints, HINTS)):
        for word in words:
            if word not in known:
                raise ExecError(
                    f"{where}: the {name} {word!r} is unknown; this version has {', '.join(known)}"
                )
    if {"early", "late"} <= set(hints):
        raise ExecError(f"{where}: a call is hinted to be early or late, not both")
    if kind.free and not set(constraints) <= {"ordered"}:
        raise ExecError(
            f"{where}: a {kind.name} lies in what it is of, so it cannot be constrained to "
            f"{', '.join(constraints)}; constrain the call that reads it"
        )
