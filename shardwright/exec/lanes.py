"""Calls made on several streams of a device, as a plan says.

Comes in: calls in order, the stream of each, and whom it waits for. What always holds: a run begins
behind what stood on the caller's stream, which is stream 0, and that waits for all others at its
end; so whoever runs a plan, or records it as a CUDA graph, sees one stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Lane(Protocol):
    """A stream, as torch has them."""

    def record_event(self) -> Any:
        """What stands on it by now."""
        ...

    def wait_event(self, event: Any) -> None:
        """Let what is put on it from now on wait for an event."""
        ...


class Lanes:
    """The streams of one executor; ``on`` lets calls inside it be put on a stream."""

    def __init__(
        self,
        beside: Sequence[Lane],
        here: Callable[[], Lane],
        on: Callable[[Any], AbstractContextManager[Any]],
    ) -> None:
        self._beside = beside
        self._here = here
        self._on = on

    def run(
        self,
        calls: Sequence[Callable[[], object]],
        streams: Sequence[int],
        waits: Sequence[Sequence[int]],
    ) -> None:
        """Put all calls on their streams, in order."""
        here = self._here()
        begun = here.record_event()
        for lane in self._beside:
            lane.wait_event(begun)
        try:
            self._put([here, *self._beside], calls, streams, waits)
        except BaseException:
            # A recording that has failed has no streams left to wait for.
            with contextlib.suppress(RuntimeError):
                self._end(here)
            raise
        self._end(here)

    def _put(
        self,
        lanes: Sequence[Lane],
        calls: Sequence[Callable[[], object]],
        streams: Sequence[int],
        waits: Sequence[Sequence[int]],
    ) -> None:
        awaited = {other for places in waits for other in places}
        done: dict[int, Any] = {}
        for place, call in enumerate(calls):
            lane = lanes[streams[place]]
            for other in waits[place]:
                lane.wait_event(done[other])
            with self._on(lane):
                call()
            if place in awaited:
                done[place] = lane.record_event()

    def _end(self, here: Lane) -> None:
        for lane in self._beside:
            here.wait_event(lane.record_event())


def cuda_lanes(device: torch.device, count: int) -> Lanes:
    """So many streams of a GPU, the caller's among them."""
    beside = [torch.cuda.Stream(device) for _ in range(count - 1)]
    return Lanes(beside, lambda: torch.cuda.current_stream(device), torch.cuda.stream)
