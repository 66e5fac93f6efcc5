"""The schedule of a pipeline file, and what the file says of a schedule.

The file has the kind and its numbers, not the actions: the same kind and numbers always give the
same actions.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.errors import ScheduleError
from shardwright.pipeline.schema import ScheduleInfo, Training
from shardwright.schedules.make import KINDS, make_schedule
from shardwright.schedules.schedule import Schedule


def schedule_of(training: Training) -> Schedule:
    """The schedule that a file's ``training`` tells.

    Raises ScheduleError that names the key where one lacks, or does not go with the others.
    """
    info, microbatches = training.schedule, training.microbatches
    if info is None:
        raise _missing("schedule")
    if microbatches is None:
        raise _missing("microbatches")
    if info.kind not in KINDS:
        raise _wrong("kind", info.kind, " or ".join(KINDS))
    try:
        schedule = make_schedule(
            info.kind, ranks=info.ranks, chunks=info.chunks, microbatches=microbatches.n
        )
    except ScheduleError as error:
        raise ScheduleError(f"training.schedule.chunks: {error}") from None
    if info.placement != schedule.placement:
        raise _wrong("placement", list(info.placement), f"{list(schedule.placement)}")
    if len(info.slots) != info.ranks:
        raise _wrong("slots", f"{len(info.slots)} lists", f"{info.ranks}, one a pipeline rank")
    return schedule


def schedule_info(schedule: Schedule, slots: Sequence[Sequence[str]]) -> ScheduleInfo:
    """What a file says of a schedule; ``slots`` are the device slots of each pipeline rank."""
    assert len(slots) == schedule.ranks
    return ScheduleInfo(
        kind=schedule.kind,
        ranks=schedule.ranks,
        chunks=schedule.chunks,
        placement=schedule.placement,
        slots=tuple(tuple(group) for group in slots),
    )


def _missing(key: str) -> ScheduleError:
    return ScheduleError(
        f"training.{key} is missing: the file is not of a training step with a schedule"
    )


def _wrong(key: str, found: object, expected: str) -> ScheduleError:
    return ScheduleError(f"training.schedule.{key} is {found!r}; expected {expected}")
