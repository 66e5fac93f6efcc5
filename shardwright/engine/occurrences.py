"""Occurrences: the steps of a slot, each as often as it runs in a training step.

An occurrence is a step on one microbatch, or once a step. Its tensors are in spaces: one a
microbatch, one for the step, one that is the slot's constants.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardwright.engine.slot_steps import SlotStep

Place = tuple[int, str]
"""A tensor: its space, and its name."""


@dataclass(frozen=True, slots=True)
class Occurrence:
    """A step, once.

    index, entry
        Its number among all, and that of the agenda's entry that says where the worker is.
    reads, space
        Where its inputs are, and where its outputs go: the microbatch's space, or the step's.
    first
        Whether accumulators count as zeros, whatever they hold.
    drops
        Tensors that nothing reads after it.
    after
        Occurrences of other turns that must be done before it begins.
    """

    index: int
    entry: int
    step: SlotStep
    reads: tuple[Place, ...]
    space: int
    first: bool = False
    drops: tuple[Place, ...] = ()
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """A turn's occurrences; turns whose ``action`` is near may be under way together."""

    action: int
    occurrences: tuple[Occurrence, ...]


def occurrences_of(turns: Iterable[PlannedTurn]) -> Iterator[Occurrence]:
    """All occurrences of turns, in order."""
    for turn in turns:
        yield from turn.occurrences
