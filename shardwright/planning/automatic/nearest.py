"""What is said where no plan fits: which slot lacks how many bytes in the nearest plan."""

from __future__ import annotations

from shardwright.planning.automatic.candidates import Found


def nearest_text(name: str, nearest: Found, slots: int) -> str:
    """Why the nearest plan of a graph on so many slots does not fit, and what would."""
    if nearest.peak <= nearest.memory:
        return _keeps_too_much(name, nearest)
    ranks = nearest.estimate.memory
    fullest = max(range(len(ranks)), key=lambda rank: ranks[rank].total)
    held, slot = ranks[fullest], nearest.estimate.slots[fullest][0]
    needed = -(-slots * nearest.peak // nearest.memory)
    return (
        f"no plan for {name!r} fits: the nearest ({nearest.candidate}, recompute "
        f"{nearest.options.recompute}) holds {held} on slot {slot!r}, "
        f"{held.total - nearest.memory} bytes more than its {nearest.memory}; it would fit in "
        f"slots of {nearest.peak} bytes; give those, about {needed} slots instead of {slots}, or "
        "capture a smaller batch and take more microbatches"
    )


def _keeps_too_much(name: str, nearest: Found) -> str:
    """Which slot keeps more activations than memory= has room for."""
    ranks = nearest.estimate.memory
    fullest = max(range(len(ranks)), key=lambda rank: ranks[rank].activations)
    return (
        f"no plan for {name!r} keeps its activations within memory={nearest.options.memory}: the "
        f"nearest ({nearest.candidate}) keeps {nearest.kept} bytes on slot "
        f"{nearest.estimate.slots[fullest][0]!r} even if all that can be is computed again; give "
        "memory= as much, or capture a smaller batch and take more microbatches"
    )
