"""What plans are compared by, whoever made them."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.planning.automatic.candidates import Found
from shardwright.planning.predicted import Prediction

_AGAIN = {
    "none": "",
    "auto": ", some activations computed again",
    "full": ", all activations computed again",
}


@dataclass(frozen=True, slots=True)
class Contender:
    """A plan in a line, what it will take, and how much of it is computed again.

    ``simulated`` is what its built file takes for a captured batch, 0 where nobody looked.
    """

    plan: str
    prediction: Prediction
    recompute: str
    simulated: float = 0.0

    def __str__(self) -> str:
        return f"{self.plan}{_AGAIN[self.recompute]}"

    @classmethod
    def of(cls, found: Found) -> Contender:
        """What the search found."""
        return cls(str(found.candidate), found.estimate.prediction(), found.options.recompute)

    @property
    def seconds(self) -> float:
        """For each batch of the captured size."""
        return self.prediction.per_microbatch

    @property
    def work(self) -> float:
        """Of the slot with the most work, for a batch of the captured size."""
        return max(slot.busy for slot in self.prediction.slots) / self.prediction.microbatches
