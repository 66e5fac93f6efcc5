"""CUDA graphs: the run of a bound plan recorded once, and replayed by one call of the driver.

All graphs of one `GraphMemory` have one private pool, for what kernels allocate while they are
recorded, beside the arena that their plans share; only one of them may run at a time, and a process
records one at a time. Warming up and recording leave the tensors that a run writes, and the random
numbers, as they were. What counts (steps, draws of dropout, learning rates) is on the device and
goes on with each replay.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwright.compiler.executor import Executor
from shardwright.compiler.memory.plan import ExecPlan
from shardwright.compiler.replay import as_before, warm_up
from shardwright.errors import DeviceError
from shardwright.ir.operators import resolve
from shardwright.kernels.lowered import BY_NAME, LoweredGraph, LoweredOp
from shardwright.torch_internals import end_pool

WARM_UP = 3
"""How many runs come before a recording: libraries choose kernels and make handles in them."""
RECORDINGS = 8
"""For how many sets of addresses a task is recorded; more show that its inputs never stay."""

Record = Callable[[Callable[[], None], Sequence[Tensor]], Callable[[], None]]
"""From a run, and the tensors that it changes, to a function that replays it.

RuntimeError where it cannot be recorded.
"""

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


class RecordedRuns:
    """The runs of one executor, recorded at the first run with each set of addresses.

    A replay runs on the addresses that it was recorded with, so other addresses get a recording of
    their own, up to a bound; what cannot be recorded runs call by call, and `reason` says why. All
    the executor's calls are torch's.
    """

    def __init__(self, executor: Executor, record: Record) -> None:
        self._executor = executor
        self._record = record
        self._replays: dict[bytes, Callable[[], None]] = {}
        self._replay: Callable[[], None] | None = None
        self._seen = -1
        self.reason = unrecordable(executor.plan)
        """Why calls are made one by one; None while they are replayed."""

    def run(self, written: Sequence[Tensor]) -> None:
        """Run on what is bound; ``written`` are the inputs that a run changes."""
        if self._seen != self._executor.memory.changes:
            self._replay = self._recorded(written) if self.reason is None else None
            self._seen = self._executor.memory.changes
        if self._replay is None:
            self._executor.run_bound()
        else:
            self._replay()

    def _recorded(self, written: Sequence[Tensor]) -> Callable[[], None] | None:
        """What replays the run at the present addresses; None, and a reason, where nothing can."""
        addresses = bytes(self._executor.memory.bases)
        found = self._replays.get(addresses)
        if found is not None:
            return found
        if len(self._replays) < RECORDINGS:
            try:
                self._replays[addresses] = self._record(self._executor.run_bound, written)
                return self._replays[addresses]
            except RuntimeError as error:
                self.reason = f"it could not be recorded: {error}"
        else:
            self.reason = f"constants of it have lain at more than {RECORDINGS} places"
        self._replays.clear()
        return None


# --- what waits for the device -------------------------------------------------------------------

_INDEXING = {"index.Tensor", "index_put.default", "index_put_.default", "_index_put_impl_.default"}
"""Operators that look up on the host where a mask is true."""
_ON_THE_HOST = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def unrecordable(plan: ExecPlan) -> str | None:
    """Why a plan cannot be recorded: a call whose results the host must know; None if none is."""
    for op in plan.calls:
        name = _needs_host(plan.lowered, op)
        if name is not None:
            return f"{name} needs its results on the host{f', {op.where}' if op.where else ''}"
    return None


def _needs_host(lowered: LoweredGraph, op: LoweredOp) -> str | None:
    """The operator's name, where it waits for a device."""
    generic = BY_NAME["generic"]
    if op.kind_id != generic.id:
        return None
    name: str = generic.unpack(op.attr_schema, op.attr_blob)["op"]
    if name.removeprefix("aten.") in _INDEXING:
        dtypes = {lowered.values[vid].dtype for vid in op.in_vids[1:] if vid in lowered.values}
        return name if dtypes & {"bool", "u8"} else None
    return name if _ON_THE_HOST.intersection(resolve(name).tags) else None
