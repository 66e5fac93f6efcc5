"""One rank of a run that torchrun, or whoever sets RANK and WORLD_SIZE, has started.

Every rank makes the same calls with the same whole inputs; rank ``i`` is device slot ``i`` and runs
its worker in a thread of this process. The pipeline's outputs are brought to rank 0 by send and
recv supertasks added at the end, so that they stream, are timed and fail like all others; rank 0's
future holds the result, the others' None.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from shardwright.comm import (
    DistributedTransport,
    LocalTransport,
    Switchboard,
    Transport,
    adopt_group,
    join_group,
    operations,
)
from shardwright.errors import LaunchError, RunError
from shardwright.pipeline import Pipeline, SuperTask
from shardwright.runtime.backend import START_PATIENCE, Backend, Finish, running_future, settle
from shardwright.runtime.generator import Slices
from shardwright.runtime.serve import Call, End, Inbox, Wake, serve
from shardwright.runtime.slot import constants_of, make_slot, torch_device
from shardwright.runtime.timeline import Event
from shardwright.runtime.worker import Finished, Worker

_END_PATIENCE = 5.0
"""Seconds that a worker gets to end what it is computing when a run is given up."""

_meetings = itertools.count()
"""Numbers the rendezvous of this process; all ranks make the same runners in the same order."""


def is_torchrun() -> bool:
    """Whether this process was started as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


class Rank(Backend):
    """This process's slot."""

    def __init__(self, pipeline: Pipeline, *, timeout: float, threads: int, trace: bool) -> None:
        self._rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if size != len(pipeline.devices):
            raise LaunchError(
                f"{size} ranks were started for the {len(pipeline.devices)} device slots of the "
                f"pipeline; start it with --nproc-per-node {len(pipeline.devices)} in all"
            )
        name = list(pipeline.devices)[self._rank]
        device = torch_device(name, pipeline.devices[name])
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._inbox: Inbox = SimpleQueue()
        self._lock = threading.Lock()
        self._calls: dict[int, tuple[Future[Any], Finish]] = {}
        self._events: list[Event] = []
        self._error: Exception | None = None
        constants = pipeline.weights.load(constants_of(pipeline, name))
        slot = make_slot(pipeline, name, constants)
        self._owns_group = not dist.is_initialized()
        self._transport = self._connect(pipeline, timeout)
        self._worker = Worker(slot, self._transport, trace=trace)
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(threads)
        self._thread = threading.Thread(target=self._serve, args=(timeout,), daemon=True)
        self._thread.start()

    def begin(self, call: int, inputs: Slices, finish: Finish) -> Future[Any]:
        """Queue this rank's part of a call."""
        future = running_future()
        with self._lock:
            if self._error is not None:
                raise RunError(f"the worker has ended: {self._error}") from self._error
            self._calls[call] = (future, finish)
        self._inbox.put(Call(call, inputs[self._worker.slot.name]))
        return future

    def events(self) -> Sequence[Event]:
        """This rank's events of finished calls."""
        return list(self._events)

    def close(self, *, abort: bool) -> None:
        """End the worker; with ``abort`` other ranks that need this one fail at once."""
        if not abort:
            for future, _ in list(self._calls.values()):
                future.exception()
        self._inbox.put(End())
        self._thread.join(_END_PATIENCE if abort else None)
        if abort or self._error is not None:
            self._transport.abort()
        else:
            self._transport.close()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        torch.set_num_threads(self._threads_before)

    def _connect(self, pipeline: Pipeline, timeout: float) -> Transport:
        if not operations(pipeline):
            return LocalTransport(Switchboard())
        kinds = [device.kind for device in pipeline.devices.values()]
        if self._owns_group:
            group = join_group(_rendezvous(timeout), self._rank, len(kinds), kinds)
        else:
            group = adopt_group()
        # Other ranks may be on other machines: of their devices only the kind counts.
        devices = [torch.device(kind) for kind in kinds]
        return DistributedTransport(
            group, self._rank, devices, operations(pipeline), lambda: self._inbox.put(Wake())
        )

    def _serve(self, timeout: float) -> None:
        try:
            serve(self._worker, self._inbox, self._collect, patience=timeout)
        except Exception as error:
            step = self._worker.at
            task = f" in supertask {step.task!r}" if step is not None else ""
            error.add_note(f"on rank {self._rank}{task}")
            with self._lock:
                self._error = error
            for future, _ in self._calls.values():
                future.set_exception(error)

    def _collect(self, finished: Finished) -> None:
        self._events.extend(finished.events)
        future, finish = self._calls.pop(finished.call)
        if self._rank == 0:
            outputs = {name: tensor.cpu() for name, tensor in finished.outputs.items()}
            settle(future, finish, outputs)
        else:
            future.set_result(None)


def _rendezvous(timeout: float) -> PrefixStore:
    """The store that MASTER_ADDR and MASTER_PORT name. Raises LaunchError."""
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    patience = timedelta(seconds=max(timeout, START_PATIENCE))
    try:
        store, _, _ = next(iter(rendezvous("env://", timeout=patience)))
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"the ranks cannot meet at {place} (MASTER_ADDR:MASTER_PORT): {error}; is the port in "
            "use, or a rank missing? Choose another with torchrun --master-port"
        ) from None
    return PrefixStore(f"shardwright/{next(_meetings)}", store)


def outputs_on_first_slot(pipeline: Pipeline) -> Pipeline:
    """The pipeline with its outputs brought to the first slot by send and recv at the end."""
    first = next(iter(pipeline.devices))
    moved = {
        name: piece.device
        for name, piece in pipeline.metadata.tensor_slices.outputs.items()
        if piece.device != first
    }
    names = {name: _free(f"{name}@{first}", pipeline.tensors) for name in moved}
    tensors = {**pipeline.tensors, **{names[name]: pipeline.tensors[name] for name in moved}}
    (output,) = pipeline.connections.ends["output"]
    tasks = {name: task for name, task in pipeline.supertasks.items() if name != output}
    for name, device in moved.items():
        group = _free(f"output {name}", pipeline.connections.groups)
        send = SuperTask("send", (name,), (), device, None, group, 0, {})
        recv = SuperTask("recv", (), (names[name],), first, None, group, 1, {})
        tasks[_free(f"send.{name}", tasks)] = send
        tasks[_free(f"recv.{name}", tasks)] = recv
    last = pipeline.supertasks[output]
    inputs = tuple(names.get(name, name) for name in last.inputs)
    tasks[output] = msgspec.structs.replace(last, inputs=inputs)
    found = msgspec.structs.replace(
        pipeline, tensors=tensors, supertasks=tasks, metadata=_moved_slices(pipeline, names, first)
    )
    found.weights = pipeline.weights
    return found


def _moved_slices(pipeline: Pipeline, names: dict[str, str], first: str) -> Any:
    metadata = pipeline.metadata
    outputs = {
        names.get(name, name): msgspec.structs.replace(piece, device=first)
        for name, piece in metadata.tensor_slices.outputs.items()
    }
    slices = msgspec.structs.replace(metadata.tensor_slices, outputs=outputs)
    return msgspec.structs.replace(metadata, tensor_slices=slices)


def _free(wanted: str, taken: Any) -> str:
    name, k = wanted, 1
    while name in taken:
        name, k = f"{wanted}__{k}", k + 1
    return name
