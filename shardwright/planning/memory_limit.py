"""How many bytes a slot has, and what of a pipeline's microbatches it has to hold at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """``nbytes`` of a slot, in a step of so many microbatches.

    Of a model that is not trained nothing is held for a backward.
    """

    nbytes: float
    microbatches: int = 1
    all_at_once: bool = False
    """Whether all forwards come before all backwards (GPipe)."""

    def under_way(self, stage: int, stages: int) -> int:
        """How many microbatches a stage holds at most: 1F1B's rank r of p has p - r."""
        return self.microbatches if self.all_at_once else min(stages - stage, self.microbatches)

    def message(self, stage: int, stages: int, least: float) -> str:
        """That no partition fits, and what would."""
        return (
            f"no cut in {stages} stages fits in memory: even the least full leaves stage {stage} "
            f"with {least:.0f} bytes, {least - self.nbytes:.0f} more than a slot's "
            f"{self.nbytes:.0f}; plan for more devices or smaller microbatches, or compute "
            "activations again (recompute=)"
        )
