"""What the compute supertasks of a pipeline take, measured one by one as the runtime runs them.

Input: what `profile_tasks` measured. Output: `TaskTimes`, which are a file and what `simulate`
takes. Invariant: they belong to the supertasks that were measured, whose hash they hold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from shardwright.costs.profile import read_stored, write_stored
from shardwright.errors import ProfileError
from shardwright.pipeline.graphs import TaskGraphs
from shardwright.pipeline.rules import COMPUTE_KINDS
from shardwright.pipeline.schema import Document, SuperTask

_NotNegative = msgspec.Meta(ge=0)


class TaskTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one run of a supertask takes.

    seconds
        The mean of several runs: a step is a sum of these, its slow ones too.
    temporary_bytes
        The most bytes alive at once while it runs, beyond its inputs and the outputs that it
        leaves. The arena of a lowered one is among them, which all of a slot have in common.
    kept_bytes
        What its program keeps for itself from run to run: a lowered one copies of inputs, and
        outputs that it hands out copies of.
    """

    seconds: Annotated[float, _NotNegative]
    temporary_bytes: Annotated[int, _NotNegative]
    kept_bytes: Annotated[int, _NotNegative] = 0


class TaskTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured times of a pipeline's compute tasks, by name.

    ``fingerprint`` identifies these tasks. Times without one, given by hand, apply to any pipeline
    with tasks of these names.
    """

    tasks: Mapping[str, TaskTime]
    fingerprint: str = ""

    def seconds(self, task: str) -> float:
        """Seconds of one run of a compute task. Raises ProfileError if it has no time."""
        return self._of(task).seconds

    def temporary_bytes(self, task: str) -> int:
        """Bytes beyond inputs and outputs that a run needs. Raises ProfileError."""
        return self._of(task).temporary_bytes

    def kept_bytes(self, task: str) -> int:
        """Bytes that a program keeps for itself. Raises ProfileError."""
        return self._of(task).kept_bytes

    def check_belong(self, document: Document) -> None:
        """Raise ProfileError where they were measured of other supertasks than a document's."""
        found = fingerprint_tasks(document)
        if self.fingerprint in ("", found):
            return
        computing = {name for name, task in _computing(document)}
        only = [
            f"{', '.join(sorted(names)[:3])}{', …' if len(names) > 3 else ''} only {where}"
            for names, where in (
                (computing - self.tasks.keys(), "here"),
                (self.tasks.keys() - computing, "there"),
            )
            if names
        ]
        what = " and ".join(only) or "the supertasks have the same names, but do something else"
        raise ProfileError(
            f"the times were measured of the supertasks of another pipeline ({self.fingerprint}, "
            f"this is {found}): {what}; measure this one's with profile_tasks or shardwright "
            "simulate --measure"
        )

    def save(self, path: str | Path) -> None:
        """Write them as JSON. Raises OSError as writing does."""
        write_stored(path, _TasksFile(1, self))

    @classmethod
    def load(cls, path: str | Path) -> TaskTimes:
        """Load times that `save` wrote. Raises ProfileError.

        Whether they belong to a pipeline is checked where they are used.
        """
        writer = "TaskTimes.save or shardwright simulate --measure --save-times"
        return read_stored(path, _TasksFile, "file of supertasks' times", writer).task_times

    def _of(self, task: str) -> TaskTime:
        if task not in self.tasks:
            known = ", ".join(self.tasks) or "none"
            raise ProfileError(
                f"no time was measured for the supertask {task!r}; there are times of {known}; "
                "profile the tasks of this pipeline (profile_tasks)"
            )
        return self.tasks[task]


class _TasksFile(msgspec.Struct, forbid_unknown_fields=True):
    """Times in a file."""

    version: Literal[1]
    task_times: TaskTimes


def fingerprint_tasks(document: Document) -> str:
    """A hash of what compute supertasks do, on which slots: their programs, names and shapes.

    Weights and the schedule do not count, nor how many microbatches there are.
    """
    graphs = TaskGraphs(document)
    rows = [(name, task.device, graphs.key(name)) for name, task in _computing(document)]
    return hashlib.sha256(repr(sorted(rows)).encode()).hexdigest()[:16]


def _computing(document: Document) -> list[tuple[str, SuperTask]]:
    tasks = document.supertasks.items()
    return [(name, task) for name, task in tasks if task.kind in COMPUTE_KINDS]
