"""A schedule as a table for a person: one row a rank, one column a slot of time.

Every F, B and W takes one slot; a B that gives weight gradients too takes two. What does not fit
into the width goes on below, as in a musical score.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from string import ascii_lowercase

from shardwright.schedules.run import Simulation, prove, simulate
from shardwright.schedules.schedule import Schedule

WAITING, GOING_ON = ".", "--"


def format_schedule(
    schedule: Schedule, *, width: int = 100, labels: Sequence[str] | None = None
) -> str:
    """The table of a schedule, how long ranks wait, what they hold, and that it cannot deadlock.

    ``F2b`` is the forward of microbatch 2 through the rank's second stage; with one stage a rank
    it is ``F2``. ``width`` is in characters, ``labels`` names the ranks (``rank 0`` by default).
    Raises ScheduleError where the schedule lacks work, or can deadlock.
    """
    prove(schedule)
    simulation = simulate(schedule)
    labels = labels or [f"rank {rank}" for rank in range(schedule.ranks)]
    heads = [_head(schedule, rank, label) for rank, label in enumerate(labels)]
    rows = [_cells(schedule, simulation, rank) for rank in range(schedule.ranks)]
    return "\n".join(
        [
            f"{schedule.kind}: ranks {schedule.ranks}, stages a rank {schedule.chunks}, "
            f"microbatches {schedule.microbatches}",
            *_wrapped(heads, rows, width),
            "",
            *_figures(schedule, simulation),
        ]
    )


def _head(schedule: Schedule, rank: int, label: str) -> str:
    """A rank's label; with several stages, their numbers by their marks."""
    stages = schedule.stages_of(rank)
    if len(stages) == 1:
        return label
    numbers = " ".join(f"{_mark(stages, stage)}={stage}" for stage in stages)
    return f"{label} ({numbers})"


def _mark(stages: Sequence[int], stage: int) -> str:
    """A letter for each of a rank's stages; its number where there are more than letters."""
    if len(stages) == 1:
        return ""
    return ascii_lowercase[stages.index(stage)] if len(stages) <= 26 else f".{stage}"


def _cells(schedule: Schedule, simulation: Simulation, rank: int) -> list[str]:
    """What a rank does in each slot of time."""
    stages = schedule.stages_of(rank)
    cells = [WAITING] * round(simulation.step_time)
    for action in schedule.actions[rank]:
        start, end = map(round, simulation.spans[action])
        cells[start] = f"{action.kind}{action.microbatch}{_mark(stages, action.stage)}"
        cells[start + 1 : end] = [GOING_ON] * (end - start - 1)
    return cells


def _wrapped(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """The rows in as many blocks as the width asks for, with the slots' numbers above each."""
    margin, length = max(map(len, heads)), len(rows[0])
    cell = 1 + max(len(text) for row in rows for text in row)
    blocks = ceil(length / max(1, (width - margin) // cell))
    columns = ceil(length / blocks)
    for first in range(0, length, columns):
        slots = range(first, min(first + columns, length))
        numbers = (str(slot) if slot in (first, *range(0, length, 5)) else "" for slot in slots)
        yield ""
        yield (" " * margin + "".join(f"{number:>{cell}}" for number in numbers)).rstrip()
        for head, row in zip(heads, rows, strict=True):
            texts = (f"{row[slot]:>{cell}}" for slot in slots)
            yield f"{head:<{margin}}{''.join(texts)}"


def _figures(schedule: Schedule, simulation: Simulation) -> Iterator[str]:
    """What the table amounts to, one line each."""
    bubbles = ", ".join(f"{bubble:.1%}" for bubble in simulation.rank_bubbles)
    peaks = ", ".join(f"{peak:g}" for peak in simulation.peak_activations)
    count = sum(map(len, schedule.actions))
    yield f"bubble            {simulation.bubble:.1%} of {simulation.step_time:g} slots ({bubbles})"
    yield f"peak activations  {peaks} (of one stage and one microbatch)"
    yield f"deadlock          impossible: one order of all {count} actions agrees with every rank's"
