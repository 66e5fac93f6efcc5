"""Candidates of the search for a plan, and why none of them fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shardwright.costs.placed import Integers, PlacedCosts
from shardwright.costs.predict import Estimate
from shardwright.ir.tensor_meta import count_text
from shardwright.planning.options import StepOptions
from shardwright.planning.shapes import Shape

STAGES = 128
"""More virtual stages are not tried."""
_AGAIN = {
    "none": "",
    "auto": ", some activations computed again",
    "full": ", all activations computed again",
}


class Setting(NamedTuple):
    """A shape with a schedule: all of a plan but where it is cut and what is done again."""

    shape: Shape
    schedule: str
    chunks: int
    zero: int

    @property
    def stages(self) -> int:
        """How many virtual stages."""
        return self.shape.pipeline * self.chunks


@dataclass(frozen=True)
class Candidate:
    """A plan that was looked at.

    options
        Those of a training step; of a model they say only how many stages a rank has.
    stages
        The stage of each node.
    memory
        Bytes of a slot.
    simulated
        Seconds of the built plan for each batch of the captured size; 0 where it was not simulated,
        infinite where it cannot be built.
    """

    shape: Shape
    options: StepOptions
    placed: PlacedCosts
    stages: Integers
    estimate: Estimate
    memory: int
    simulated: float = 0.0

    def __str__(self) -> str:
        options = self.options
        chunks = options.chunks or 1
        each = f" of {chunks} stages a rank" if chunks > 1 else ""
        schedule = f", {options.schedule}{each}" if self.shape.pipeline > 1 else ""
        zero = ", optimizer state sharded" if options.zero else ""
        count = count_text(options.microbatches, "microbatch")
        return f"{self.shape}{schedule}, {count}{zero}{_AGAIN[options.recompute]}"

    @property
    def seconds(self) -> float:
        """For each batch of the captured size."""
        return self.estimate.step_time / self.estimate.microbatches

    @property
    def work(self) -> float:
        """Of the slot with the most work, for a batch of the captured size."""
        return max(self.estimate.busy) / self.estimate.microbatches

    @property
    def peak(self) -> int:
        """Bytes of the fullest slot."""
        return max(held.total for held in self.estimate.memory)

    @property
    def kept(self) -> int:
        """Bytes of activations on the slot that keeps the most."""
        return max(held.activations for held in self.estimate.memory)

    @property
    def too_much(self) -> int:
        """Bytes that a slot would hold, or keep of activations, above what it may; 0 if it fits."""
        over = self.peak - self.memory
        if self.options.memory is not None:
            over = max(over, self.kept - self.options.memory)
        return max(over, 0)

    @property
    def fits(self) -> bool:
        """Whether every slot holds, and keeps of activations, no more than it may."""
        return self.too_much == 0


def too_many_stages(setting: Setting, nodes: int) -> str:
    """Why a graph of so many nodes has no such plan."""
    limit = f"the {nodes} nodes of the graph" if nodes <= STAGES else f"{STAGES}, the most tried"
    return (
        f"{setting.shape.pipeline} pipeline ranks with {setting.chunks} chunks each are "
        f"{setting.stages} virtual stages, more than {limit}; take fewer chunks or slots"
    )


def nearest_text(name: str, nearest: Candidate, slots: int) -> str:
    """Why the nearest plan of a graph on so many slots does not fit, and what would."""
    ranks = nearest.estimate.memory
    if nearest.peak <= nearest.memory:
        fullest = max(range(len(ranks)), key=lambda rank: ranks[rank].activations)
        return (
            f"no plan for {name!r} keeps its activations within memory={nearest.options.memory}: "
            f"the nearest ({nearest}) keeps {nearest.kept} bytes on slot "
            f"{nearest.estimate.slots[fullest][0]!r} even if all that can be is computed again; "
            "give memory= as much, or capture a smaller batch and take more microbatches"
        )
    fullest = max(range(len(ranks)), key=lambda rank: ranks[rank].total)
    held, slot = ranks[fullest], nearest.estimate.slots[fullest][0]
    needed = -(-slots * nearest.peak // nearest.memory)
    return (
        f"no plan for {name!r} fits: the nearest ({nearest}) holds {held} on slot {slot!r}, "
        f"{held.total - nearest.memory} bytes more than its {nearest.memory}; it would fit in "
        f"slots of {nearest.peak} bytes; give those, about {needed} slots instead of {slots}, or "
        "capture a smaller batch and take more microbatches"
    )
