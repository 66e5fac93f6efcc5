"""What a worker raised, as the error of whoever asked for the work: the same wherever it ran.

Comes in: an exception and where its worker was. Goes out: an error of the product's own tree that
names the device slot, the supertask and the node. Errors about the pipeline or the machine stay
what they are; any other is a WorkerError.
"""

from __future__ import annotations

import traceback

from shardwright.engine.program import Entry
from shardwright.errors import (
    DeviceError,
    GraphError,
    LaunchError,
    RunError,
    ShardwrightError,
    WeightError,
    WorkerError,
    WriteError,
)
from shardwright.launch.connection import Failed

_PASSED_ON: dict[str, type[ShardwrightError]] = {
    kind.__name__: kind
    for kind in (DeviceError, GraphError, LaunchError, RunError, WeightError, WriteError)
}
"""Errors about the pipeline or the machine: they stay what they are when a worker meets them."""


def failed(error: BaseException, at: Entry | None = None) -> Failed:
    """An exception as data, with the place where its worker was."""
    text = "".join(traceback.format_exception(error))
    said = "; ".join((str(error), *getattr(error, "__notes__", ())))
    return Failed(type(error).__name__, said, text, *(at or ()))


def failure(told: Failed, rank: int, slot: str, *, elsewhere: bool) -> ShardwrightError:
    """The error of what a worker told; with its traceback, where it ran in another process."""
    if told.error in _PASSED_ON:
        kind = _PASSED_ON[told.error]
        return kind(f"rank {rank} (device slot {slot!r}): {told.message}")
    trace = f"\n\nOn the worker:\n{told.traceback}" if elsewhere else ""
    return WorkerError(
        f"{told.error}: {told.message}{trace}",
        rank=rank,
        task=told.task,
        tensor=told.tensor,
        stage=told.stage,
        microbatch=told.microbatch,
        lost=told.error == WorkerError.__name__,
    )
