"""Every exception that shardwright raises, as one tree.

    ShardwrightError
    ├── GraphError          an IRGraph breaks a rule, or its text does not parse
    ├── DrawError           a graph cannot be drawn as asked, or there is no Graphviz
    ├── CaptureError        a model cannot be captured; names the line and what to change
    ├── AnnotationError     a dimension annotation is wrong, or does not allow what is asked
    ├── ProfileError        a measurement failed, or its cache or file cannot be read
    ├── PlanError           a plan cannot be made, or does not belong to this graph
    ├── ExecError           a graph cannot be lowered, or an execution plan be made or bound
    ├── CodegenError        code cannot be generated for a plan or a pipeline
    ├── PipelineError       a pipeline breaks a rule of the format; names rule, task and tensor
    ├── ScheduleError       a schedule cannot be made as asked, lacks work, or can deadlock
    ├── WeightError         a weight file is missing, or lacks a tensor, or holds another shape
    ├── InputError          arguments given to a graph or a pipeline do not fit it
    ├── WriteError          a file cannot be written; an OSError too, with its filename and strerror
    ├── VerifyError         a pipeline computes something else than the model it came from
    └── RunError            a pipeline could not be run
        ├── DeviceError     this machine lacks a device that the pipeline names
        ├── LaunchError     the worker processes could not be started or connected
        └── WorkerError     a worker failed, died or stood still; names rank, task and tensor

A message says where, what was found, what was expected, and what to do next.
"""

from __future__ import annotations

import re


class ShardwrightError(Exception):
    """Base of every error that shardwright raises on purpose."""


class GraphError(ShardwrightError):
    """An IRGraph is not valid, or a text is not the text of one.

    ``node`` is the name of the node that is wrong in a graph's text, where it is one.
    """

    def __init__(self, message: str, *, node: str | None = None) -> None:
        super().__init__(message)
        self.node = node


class DrawError(ShardwrightError):
    """A graph cannot be drawn as asked, or Graphviz is not there to lay it out."""


class CaptureError(ShardwrightError):
    """A model, or its arguments, cannot be captured as a graph."""


class AnnotationError(ShardwrightError):
    """A dimension annotation does not parse or fit, or a split would compute something else.

    ``text`` is the annotation and ``column`` where in it, counted from 1; None where the error
    has no such place.
    """

    def __init__(self, message: str, *, text: str | None = None, column: int | None = None) -> None:
        where = ""
        if text is not None and column:
            line = re.sub(r"\s", " ", text)
            where = f"column {column}: "
            message = f"{message}\n    {line}\n    {' ' * (column - 1)}^"
        super().__init__(f"{where}{message}")
        self.text = text
        self.column = column


class ProfileError(ShardwrightError):
    """Something could not be measured; or stored measurements cannot be read."""


class PlanError(ShardwrightError):
    """A plan cannot be made as asked, or a plan does not fit the graph it is used with."""


class ExecError(ShardwrightError):
    """A graph cannot be lowered, or an execution plan cannot be made, bound or replayed."""


class CodegenError(ShardwrightError):
    """Python cannot be written for what a plan or a pipeline does, or cannot be formatted."""


class PipelineError(ShardwrightError):
    """A pipeline breaks a rule of the format.

    ``rule`` names the rule (``one-producer``), ``task`` the supertask, ``node`` the node of its
    graph and ``tensor`` the tensor where it was seen; None where the rule has no such place.
    ``reason`` is the message without them.
    """

    def __init__(
        self,
        message: str,
        *,
        rule: str | None = None,
        task: str | None = None,
        node: str | None = None,
        tensor: str | None = None,
    ) -> None:
        place = [
            f"{label} {name!r}"
            for label, name in (("supertask", task), ("tensor", tensor))
            if name is not None
        ]
        where = f"{', '.join(place)}: " if place else ""
        suffix = f" [rule {rule}]" if rule else ""
        super().__init__(f"{where}{message}{suffix}")
        self.reason = message
        self.rule = rule
        self.task = task
        self.node = node
        self.tensor = tensor


class ScheduleError(ShardwrightError):
    """A schedule cannot be made as asked, or its order lacks work or can deadlock."""


class WeightError(ShardwrightError):
    """A stored weight is missing or is not what the graph or the pipeline says it is."""


class InputError(ShardwrightError):
    """Arguments do not have the names, structure, shapes or dtypes that were captured."""


class WriteError(ShardwrightError, OSError):
    """A file or directory cannot be written, for want of space or of permission.

    ``filename`` says which and ``strerror`` why. What stood there before still does.
    """

    def __str__(self) -> str:
        if self.filename is None:
            return super().__str__()
        return f"{self.filename} cannot be written: {self.strerror}"


class VerifyError(ShardwrightError):
    """A pipeline's outputs differ from the reference model's."""


class RunError(ShardwrightError):
    """A pipeline could not be run."""


class DeviceError(RunError):
    """The machine has no device of the kind and index that a device slot names."""


class LaunchError(RunError):
    """Worker processes could not be started, or did not find one another."""


class WorkerError(RunError):
    """A worker failed while it ran a supertask.

    ``rank`` is the index of the device slot, ``task`` and ``tensor`` the supertask and tensor at
    hand, ``stage`` and ``microbatch`` those of a training step; None where the worker was in none.
    ``lost`` says that the worker is gone or stands still, so that a new one may do what it did not;
    else what it ran has raised an exception, as it would again.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        task: str | None = None,
        tensor: str | None = None,
        stage: int | None = None,
        microbatch: int | None = None,
        lost: bool = False,
    ) -> None:
        labels = {
            "rank": rank,
            "stage": stage,
            "supertask": task,
            "microbatch": microbatch,
            "tensor": tensor,
        }
        place = [f"{label} {name}" for label, name in labels.items() if name is not None]
        super().__init__(f"{', '.join(place)}: {message}" if place else message)
        self.rank = rank
        self.task = task
        self.tensor = tensor
        self.stage = stage
        self.microbatch = microbatch
        self.lost = lost
