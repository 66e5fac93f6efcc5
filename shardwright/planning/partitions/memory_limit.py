"""How many bytes a slot has, and what of a pipeline's microbatches it has to hold at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardwright.planning.partitions.shares import Shares
from shardwright.schedules import make_schedule


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """``nbytes`` of a slot, in a step of so many microbatches in the order of a schedule.

    ``chunks`` is how many stages a rank has, ``names`` the slot of each stage, for messages. Of a
    model that is not trained nothing is held for a backward, so the schedule does not matter.
    """

    nbytes: float
    microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    names: tuple[str, ...] = ()

    def under_way(self, stage: int, stages: int) -> int:
        """How many microbatches a stage holds at most between their forwards and backwards."""
        return _peaks(self.schedule, stages // self.chunks, self.chunks, self.microbatches)[stage]

    def held(self, shares: Shares, replicas: Sequence[int] | None = None) -> list[float]:
        """The bytes that each slot of a rank holds at most; one slot each by default."""
        replicas = [1] * len(shares.stored) if replicas is None else replicas
        stages = len(shares.ranks)
        counts: list[list[int]] = [[] for _ in shares.stored]
        for stage, rank in enumerate(shares.ranks):
            counts[rank].append(self.under_way(stage, stages))
        return [
            stored + kept * sum(found) / len(found) / slots
            for stored, kept, found, slots in zip(
                shares.stored, shares.kept, counts, replicas, strict=True
            )
        ]

    def message(self, stage: int, stages: int, least: float) -> str:
        """That no partition fits, and what would."""
        return (
            f"no cut in {stages} stages fits in memory: even the least full leaves stage {stage}"
            f"{f' on slot {self.names[stage]!r}' if self.names else ''} with "
            f"{lacking(least, self.nbytes)}"
        )


REMEDY = "plan for more devices or smaller microbatches, or compute activations again (recompute=)"


def lacking(least: float, room: float) -> str:
    """So many bytes, how many lack, and what would do."""
    return (
        f"{least:.0f} bytes, {least - room:.0f} more than a slot's {room:.0f}; it would fit in "
        f"slots of {math.ceil(least)} bytes: give those, {REMEDY}"
    )


@lru_cache(maxsize=256)
def _peaks(kind: str, ranks: int, chunks: int, microbatches: int) -> Sequence[int]:
    """The most microbatches that each stage holds, from its forward to its last backward work."""
    schedule = make_schedule(kind, ranks=ranks, microbatches=microbatches, chunks=chunks)
    change = {"F": 1, schedule.works[-1]: -1}
    held, peaks = [0] * schedule.stages, [0] * schedule.stages
    for action in (action for actions in schedule.actions for action in actions):
        held[action.stage] += change.get(action.kind, 0)
        peaks[action.stage] = max(peaks[action.stage], held[action.stage])
    return peaks
