"""What the search for a plan is asked for, what it tries, and what it finds, as values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwright.errors import PlanError
from shardwright.ir.tensor_meta import count_text
from shardwright.planning.automatic.shapes import Shape
from shardwright.planning.options import StepOptions
from shardwright.planning.predicted import Prediction
from shardwright.planning.prediction.predict import Estimate
from shardwright.planning.prediction.source import Integers
from shardwright.planning.prediction.spread import Spread
from shardwright.planning.rules import DATA

MICROBATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of microbatches that are tried where none is given."""
SCHEDULES: tuple[tuple[str, int], ...] = (
    ("1f1b", 1),
    ("gpipe", 1),
    ("zb-h1", 1),
    ("interleaved", 2),
    ("interleaved", 4),
    ("zb-v", 2),
)
"""Kinds of schedules with their virtual stages a rank."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What is given; None is for the search to choose."""

    microbatches: int | None = None
    schedule: str | None = None
    chunks: int | None = None
    recompute: str | None = None
    memory: int | None = None
    zero: int | None = None

    def options(self) -> StepOptions:
        """The same with the defaults of all that is not given."""
        given = {name: getattr(self, name) for name in self.__slots__}
        return StepOptions(**{name: found for name, found in given.items() if found is not None})

    def counts(self, training: bool) -> Sequence[int]:
        """Numbers of microbatches to try."""
        if not training:
            return (1,)
        return MICROBATCHES if self.microbatches is None else (self.microbatches,)

    def schedules(self, ranks: int) -> Iterator[tuple[str, int]]:
        """Kinds of schedules to try, with their chunks."""
        if ranks == 1 and self.schedule is None and self.chunks is None:
            yield "1f1b", 1
            return
        for kind, chunks in SCHEDULES:
            if self.schedule in (None, kind) and self.chunks in (None, chunks):
                yield kind, chunks
        if (
            self.chunks is not None
            and (self.schedule or "interleaved", self.chunks) not in SCHEDULES
        ):
            yield self.schedule or "interleaved", self.chunks

    def check(self) -> None:
        """Raise PlanError for what is not to be had on any mesh."""
        options = self.options()
        options.check({DATA: 2})
        if self.chunks is not None and (type(self.chunks) is not int or self.chunks < 1):
            raise PlanError(f"chunks must be a number from 1 up, found {self.chunks!r}")
        if self.schedule is not None:
            options.schedule_on(2)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A shape with a schedule: all of a plan but where it is cut and what is done again."""

    shape: Shape
    schedule: str
    chunks: int
    microbatches: int
    zero: int

    @property
    def stages(self) -> int:
        """How many virtual stages."""
        return self.shape.pipeline * self.chunks

    def __str__(self) -> str:
        pipelined = self.shape.pipeline > 1
        chunks = f" of {self.chunks} stages a rank" if self.chunks > 1 else ""
        schedule = f", {self.schedule}{chunks}" if pipelined else ""
        zero = ", optimizer state dealt out" if self.zero else ""
        return f"{self.shape}{schedule}, {count_text(self.microbatches, 'microbatch')}{zero}"


_AGAIN = {
    "none": "",
    "auto": ", some activations computed again",
    "full": ", all activations computed again",
}


@dataclass(frozen=True)
class Found:
    """A candidate with its cut, and what that takes."""

    candidate: Candidate
    spread: Spread
    stages: Integers
    options: StepOptions
    estimate: Estimate
    memory: int
    """Bytes that a slot may hold."""
    simulated: float = 0.0
    """Simulated seconds for each batch of the captured size; 0 where it was not simulated."""

    def __str__(self) -> str:
        return f"{self.candidate}{_AGAIN[self.options.recompute]}"

    @property
    def prediction(self) -> Prediction:
        """What a step takes, and each slot's memory."""
        return self.estimate.prediction()

    @property
    def work(self) -> float:
        """Of the slot with the most work, for a batch of the captured size."""
        return max(slot.busy for slot in self.prediction.slots) / self.estimate.microbatches

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

    @property
    def seconds(self) -> float:
        """For each batch of the captured size."""
        return self.estimate.step_time / self.estimate.microbatches


# --- where no plan fits ---------------------------------------------------------------------------


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
