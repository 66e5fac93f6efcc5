"""CUDA graphs: a bound plan recorded once, and replayed by one call of the driver.

Comes in: a function that runs a bound plan on memory whose addresses never change. Goes out: what
replays it, or a `RecordedGraph`, which copies inputs into buffers of its own and replays.

What always holds: all graphs of one `GraphMemory` have one private pool, for what kernels allocate
while they are recorded, beside the arena that their plans share; only one of them may run at a
time, and a process records one at a time. Warming up and recording leave the tensors that a run
writes, and the random numbers, as they were. What counts (steps, draws of dropout, learning rates)
lies on the device and goes on with each replay.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwright.compiler.replay import as_before, warm_up
from shardwright.errors import DeviceError
from shardwright.torch_internals import end_pool

WARM_UP = 3
"""How many runs come before a recording: libraries choose kernels and make handles in them."""


_recording = threading.Lock()
"""Held while something is recorded: torch takes one recording at a time in a process."""


class GraphMemory:
    """The memory that all CUDA graphs of a program, or of a pipeline's stage, share."""

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise DeviceError(
                f"the program is compiled for {device}, but this machine has no CUDA device; "
                "compile it for the cpu, or run it where one is"
            )
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)
        self._failed: list[torch.cuda.CUDAGraph] = []

    @torch.no_grad()
    def record(
        self, run: Callable[[], object], written: Sequence[Tensor], times: int = WARM_UP
    ) -> Callable[[], None]:
        """What replays a run, which is run so many times before; ``written`` is what it changes.

        The default generator is the graph's, so each replay draws on from where that is. Raises
        RuntimeError where the run waits for the device.
        """
        graph = torch.cuda.CUDAGraph()
        here = torch.cuda.current_stream(self.device)
        # A recording that fails leaves its own stream in force: the outer one brings ours back.
        with _recording, torch.cuda.device(self.device), torch.cuda.stream(here):
            self._warm_up(run, written, times)
            try:
                with as_before((), self.device), self._recorded_by(graph):
                    run()
            except RuntimeError:
                self._abandon(graph)
                raise
        return graph.replay

    def _recorded_by(self, graph: torch.cuda.CUDAGraph) -> torch.cuda.graph:
        """Other threads, those of slots in the same process and of NCCL, may go on meanwhile."""
        return torch.cuda.graph(
            graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
        )

    def _warm_up(self, run: Callable[[], object], written: Sequence[Tensor], times: int) -> None:
        """Run on the stream that is recorded, as torch asks for."""
        here = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            warm_up(run, times, written, self.device)
        here.wait_stream(self.stream)

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Take another pool: torch's allocator goes on asking the graph of a failed recording."""
        self._failed.append(graph)
        with contextlib.suppress(RuntimeError):  # it had ended before it failed
            end_pool(self.stream.device_index, self.pool)
        self.pool = torch.cuda.graph_pool_handle()


class RecordedGraph:
    """A run as a CUDA graph.

    run
        Runs on ``inputs``; gives its outputs, which lie where they lie each time.
    inputs
        The buffers that a replay copies its inputs into.
    written
        Tensors that a run changes: warming up leaves them as they were.
    """

    def __init__(
        self,
        run: Callable[[], list[Tensor]],
        inputs: Sequence[Tensor],
        written: Sequence[Tensor],
        memory: GraphMemory,
        times: int | None = None,
    ) -> None:
        self._inputs = inputs
        self._outputs: list[Tensor] = []

        def keep_outputs() -> None:
            self._outputs = run()

        self._replay = memory.record(keep_outputs, written, WARM_UP if times is None else times)

    @torch.no_grad()
    def replay(self, inputs: Sequence[Tensor], *, slots: bool = False) -> list[Tensor]:
        """Run once on these inputs; gives copies of the outputs, or the slots they lie in."""
        for buffer, given in zip(self._inputs, inputs, strict=True):
            buffer.copy_(given, non_blocking=True)
        self._replay()
        return self._outputs if slots else [output.clone() for output in self._outputs]
