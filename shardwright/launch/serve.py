"""The loop of a host that has a thread or a process of its own.

What is asked comes through an inbox. The loop advances the host as long as it can and sleeps when
it cannot, until the inbox's bell rings or something comes over a transport.
"""

from __future__ import annotations

from collections.abc import Callable

from shardwright.engine.slot_engine import Finished
from shardwright.errors import WorkerError
from shardwright.launch.host import Answer, Host
from shardwright.launch.inbox import End, Inbox


def serve(
    host: Host,
    inbox: Inbox,
    tell: Callable[[Finished | Answer], None],
    patience: float | None = None,
) -> None:
    """Do what ``inbox`` asks until `End`; hand what comes of it to ``tell``.

    Raises what a step raises, and WorkerError when a call needs something and nothing arrives for
    ``patience`` seconds (None leaves the watch to somebody else).
    """
    while True:
        while (item := inbox.take()) is not None:
            if isinstance(item, End):
                return
            host.take(item)
        if host.advance():
            while (outcome := host.outcome()) is not None:
                tell(outcome)
        else:
            worker = host.active
            if not worker.wait(inbox.bell, patience if worker.busy else None):
                raise _stuck(host, patience)
            inbox.quiet()


def _stuck(host: Host, patience: float | None) -> WorkerError:
    call, index, _ = host.active.awaited()
    entry = host.active.program.entries[index]
    return WorkerError(
        f"nothing came for {patience:g} s (call {call}); is another rank hung? Raise timeout= if "
        "the others take longer",
        rank=host.slot.rank,
        lost=True,
        task=entry.task,
        tensor=entry.tensor,
        stage=entry.stage,
        microbatch=entry.microbatch,
    )
