"""The loop of a worker that has a thread or a process of its own.

Calls come through a queue; the transport wakes the loop through the same queue. The loop advances
the worker as long as it can and sleeps when it cannot, without polling.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import NamedTuple

from torch import Tensor

from shardwright.errors import WorkerError
from shardwright.runtime.worker import Finished, Worker


class Call(NamedTuple):
    """A call to run: its number, and the pipeline inputs of the worker's slot."""

    number: int
    inputs: dict[str, Tensor]


class End(NamedTuple):
    """No more calls will come."""


class Wake(NamedTuple):
    """Something may have arrived."""


Inbox = SimpleQueue[Call | End | Wake]


def serve(
    worker: Worker,
    inbox: Inbox,
    reply: Callable[[Finished], None],
    patience: float | None = None,
) -> None:
    """Run the calls of ``inbox`` until `End`; hand what is finished to ``reply``.

    Raises what a step raises, and WorkerError when a call needs something and nothing arrives for
    ``patience`` seconds (None leaves the watch to somebody else).
    """
    while True:
        while not inbox.empty():
            if not _take(worker, inbox.get()):
                return
        if worker.advance():
            while (finished := worker.finished()) is not None:
                reply(finished)
        elif not _take(worker, _sleep(worker, inbox, patience)):
            return


def _take(worker: Worker, item: Call | End | Wake) -> bool:
    """Begin a call that has come. False at the end."""
    if isinstance(item, Call):
        worker.begin(item.number, item.inputs)
    return not isinstance(item, End)


def _sleep(worker: Worker, inbox: Inbox, patience: float | None) -> Call | End | Wake:
    """Wait for the next item."""
    worker.pause()
    start = time.monotonic()
    try:
        item = inbox.get(timeout=patience if worker.busy else None)
    except Empty:
        raise _stuck(worker, patience) from None
    worker.waited(start, time.monotonic())
    return item


def _stuck(worker: Worker, patience: float | None) -> WorkerError:
    call, index = worker.awaited()
    step = worker.slot.steps[index]
    return WorkerError(
        f"nothing came for {patience:g} s (call {call}); is another rank hung? Raise timeout= if "
        "the others take longer",
        rank=worker.slot.rank,
        task=step.task,
        tensor=step.tensor,
    )
