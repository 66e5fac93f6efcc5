"""What a schedule is: for each pipeline rank, in which order it works on which microbatch.

A model is cut in virtual stages, numbered along the forward; each is on one pipeline rank, and a
rank has one or several (its chunks). A rank works its list of actions off one after another; what
an action needs from another rank it waits for, and what it makes is sent without waiting.

Invariant of `make_schedule`'s values: `prove` accepts them, and every stage takes the
microbatches in their order, in its forwards, its backwards and its weight gradients, so that
gradients are summed in the order in which one device would.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Work = Literal["F", "B", "W"]
"""Forward, backward, weight gradients."""

ScheduleKind = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]


class Action(msgspec.Struct, frozen=True, gc=False):
    """One stage's work on one microbatch; both are counted from 0.

    ``B`` gives the gradients of the stage's inputs, and those of its weights too where the
    schedule has no ``W``.
    """

    kind: Work
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} of stage {self.stage}"


class Schedule(msgspec.Struct, frozen=True):
    """The order of work of every pipeline rank in one training step.

    ``placement`` is the pipeline rank of each virtual stage, ``actions`` one list a rank.
    ``splits_backward`` says whether weight gradients are actions of their own.
    """

    kind: ScheduleKind
    ranks: int
    chunks: int
    microbatches: int
    placement: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    splits_backward: bool

    @property
    def works(self) -> tuple[Work, ...]:
        """The kinds of actions that it has."""
        return ("F", "B", "W") if self.splits_backward else ("F", "B")

    @property
    def stages(self) -> int:
        """The number of virtual stages."""
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The virtual stages of a pipeline rank, in the forward's order."""
        return tuple(stage for stage, where in enumerate(self.placement) if where == rank)
