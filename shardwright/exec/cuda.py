"""CUDA graphs: a bound plan recorded once, and replayed by one call of the driver.

Comes in: a function that runs a bound plan on memory whose addresses never change. Goes out: a
`RecordedGraph`, which copies inputs into buffers of its own and replays.

What always holds: all graphs of one `GraphMemory` have one private pool, for what kernels allocate
while they are recorded, beside the arena that their plans share; only one of them may run at a
time. Warming up and recording leave the tensors that a run
writes, and the random numbers, as they were. What counts (steps, draws of dropout, learning rates)
lies on the device and goes on with each replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwright.errors import DeviceError
from shardwright.exec.replay import as_before, warm_up

WARM_UP = 3
"""How many runs come before a recording: libraries choose kernels and make handles in them."""


class GraphMemory:
    """The memory that all CUDA graphs of a program share."""

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise DeviceError(
                f"the program is compiled for {device}, but this machine has no CUDA device; "
                "compile it for the cpu, or run it where one is"
            )
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)


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
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(memory.device), torch.no_grad():
            self._warm_up(run, written, memory, WARM_UP if times is None else times)
            with (
                as_before((), memory.device),
                torch.cuda.graph(self._graph, pool=memory.pool, stream=memory.stream),
            ):
                self._outputs = run()

    def _warm_up(
        self,
        run: Callable[[], list[Tensor]],
        written: Sequence[Tensor],
        memory: GraphMemory,
        times: int,
    ) -> None:
        """Run on the stream that is recorded, as torch asks for."""
        here = torch.cuda.current_stream(memory.device)
        memory.stream.wait_stream(here)
        with torch.cuda.stream(memory.stream):
            warm_up(run, times, written, memory.device)
        here.wait_stream(memory.stream)

    @torch.no_grad()
    def replay(self, inputs: Sequence[Tensor], *, slots: bool = False) -> list[Tensor]:
        """Run once on these inputs; gives copies of the outputs, or the slots they lie in."""
        for buffer, given in zip(self._inputs, inputs, strict=True):
            buffer.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._outputs if slots else [output.clone() for output in self._outputs]
