"""What a slot does, in which order, as it follows from the file alone.

In comes a checked document and a slot's name; out comes its agenda: turns, each a run of the
slot's supertasks in file order. A pipeline without training has one turn, which is a whole call. A
training step has one for the phase ``prepare``, one for each action of its schedule (two for a
backward that is not split, input gradients before weight gradients) and one for ``update``; turns
in which the slot has nothing to do are left out.

What always holds: everybody who reads the file finds the same agenda, so a number is enough to
say where a worker is: that of an `Entry` in `entries`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.pipeline.check_schedule import phases_of, schedule_of
from shardwright.pipeline.connections import Connections, connect
from shardwright.pipeline.schema import Document, Phase
from shardwright.schedules.schedule import Action


class Entry(NamedTuple):
    """A supertask at its place in the agenda; ``tensor`` is what a communication is about."""

    task: str
    tensor: str | None = None
    stage: int | None = None
    microbatch: int | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """Supertasks that a slot runs one after another.

    ``action`` counts the schedule's actions, with ``prepare`` before the first and ``update`` after
    the last; ``microbatch`` is the action's, None in the phases that run once a step.
    """

    action: int
    entries: tuple[Entry, ...]
    microbatch: int | None = None


def is_training(document: Document) -> bool:
    """Whether the document is of a training step, cut in microbatches."""
    return document.training is not None and document.training.microbatches is not None


def default_lookahead(document: Document) -> int:
    """How many actions a worker begins early where nobody says."""
    assert document.training is not None
    assert document.training.schedule is not None
    return 2 if document.training.schedule.ranks == 1 else 1


def agenda(
    document: Document, slot: str, connections: Connections | None = None
) -> tuple[Turn, ...]:
    """The turns of a slot in one call or one step."""
    tasks = (connections or connect(document)).order[slot]
    if not is_training(document):
        return (Turn(0, tuple(_entry(document, task) for task in tasks)),)
    return tuple(turn for turn in _turns(document, slot, tasks) if turn.entries)


def entries(turns: Sequence[Turn]) -> list[Entry]:
    """All entries of an agenda, in order."""
    return [entry for turn in turns for entry in turn.entries]


def _turns(document: Document, slot: str, tasks: Sequence[str]) -> Iterator[Turn]:
    assert document.training is not None
    assert document.training.schedule is not None
    schedule = schedule_of(document.training)
    ranks = document.training.schedule.slots
    actions = schedule.actions[next(rank for rank, slots in enumerate(ranks) if slot in slots)]
    places: dict[tuple[Phase | None, int | None], list[str]] = {}
    for task in tasks:
        spec = document.supertasks[task]
        places.setdefault((spec.phase, spec.stage), []).append(task)

    def turn(number: int, phase: Phase, action: Action | None = None) -> Turn:
        stage, microbatch = (action.stage, action.microbatch) if action else (None, None)
        mine = places.get((phase, stage), [])
        return Turn(
            number, tuple(_entry(document, task, stage, microbatch) for task in mine), microbatch
        )

    yield turn(0, "prepare")
    for number, action in enumerate(actions, start=1):
        for phase in phases_of(schedule, action.kind):
            yield turn(number, phase, action)
    yield turn(len(actions) + 1, "update")


def _entry(
    document: Document, task: str, stage: int | None = None, microbatch: int | None = None
) -> Entry:
    spec = document.supertasks[task]
    tensor = next(iter((*spec.inputs, *spec.outputs))) if spec.group is not None else None
    return Entry(task, tensor, stage, microbatch)
