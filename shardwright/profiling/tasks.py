"""What the compute supertasks of a pipeline take, measured one by one as the runtime runs them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from shardwright.errors import ProfileError


class TaskTime(msgspec.Struct, frozen=True):
    """What one run of a supertask takes.

    seconds
        The mean of several runs: a step is a sum of these, its slow ones too.
    temporary_bytes
        The most bytes alive at once while it runs, beyond its inputs and the outputs that it
        leaves.
    """

    seconds: float
    temporary_bytes: int


class TaskTimes(msgspec.Struct, frozen=True):
    """The times of a pipeline's compute supertasks, by name."""

    tasks: Mapping[str, TaskTime]

    def seconds(self, task: str) -> float:
        """Seconds of one run of a compute supertask. Raises ProfileError where it has no time."""
        return self._of(task).seconds

    def temporary_bytes(self, task: str) -> int:
        """Bytes beyond inputs and outputs that a run needs. Raises ProfileError."""
        return self._of(task).temporary_bytes

    def _of(self, task: str) -> TaskTime:
        if task not in self.tasks:
            known = ", ".join(self.tasks) or "none"
            raise ProfileError(
                f"no time was measured for the supertask {task!r}; there are times of {known}; "
                "profile the tasks of this pipeline (profile_tasks)"
            )
        return self.tasks[task]
