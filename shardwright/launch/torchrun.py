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
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from shardwright.comm import (
    Loopback,
    LoopbackTransport,
    Operation,
    Transport,
    adopt_group,
    connect,
    gather_bytes,
    join_group,
    operations,
)
from shardwright.engine.generator import Slices
from shardwright.engine.program import Entry, constants_of
from shardwright.engine.slot import LoadedSlot, torch_device
from shardwright.engine.slot_engine import Finished, SlotEngine
from shardwright.engine.timeline import Event
from shardwright.errors import LaunchError, RunError, ShardwrightError, WorkerError
from shardwright.launch.backend import START_PATIENCE, Backend, Finish, running_future, settle
from shardwright.launch.connection import Answered, from_bytes, to_bytes
from shardwright.launch.host import Answer, Call, Host, Item, Load, Reply, Request
from shardwright.launch.inbox import End, Inbox
from shardwright.launch.making import Options, make_worker
from shardwright.launch.relays import relays, relays_of
from shardwright.launch.serve import serve
from shardwright.pipeline import Pipeline, SuperTask
from shardwright.torch_internals import default_store

_END_PATIENCE = 5.0
"""Seconds that a worker gets to end what it is computing when a run is given up."""

_meetings = itertools.count()
"""Numbers the rendezvous of this process; all ranks make the same runners in the same order."""


def is_torchrun() -> bool:
    """Whether this process was started as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


class Rank(Backend):
    """This process's slot."""

    def __init__(
        self, pipeline: Pipeline, *, timeout: float, threads: int, options: Options
    ) -> None:
        self._rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if size != len(pipeline.devices):
            raise LaunchError(
                f"{size} ranks were started for the {len(pipeline.devices)} device slots of the "
                f"pipeline; start it with --nproc-per-node {len(pipeline.devices)} in all"
            )
        self._slots = list(pipeline.devices)
        name = self._slots[self._rank]
        device = torch_device(name, pipeline.devices[name])
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._timeout, self._threads = timeout, threads
        self._kinds = [device.kind for device in pipeline.devices.values()]
        self._store: PrefixStore | None = None
        self._pipelines = itertools.count()
        self._inbox = Inbox()
        self._lock = threading.Lock()
        self._calls: dict[int, tuple[Future[Any], Finish | None]] = {}
        self._events: list[Event] = []
        self._error: Exception | None = None
        self._options = options
        self._owns_group = not dist.is_initialized()
        self._groups: list[dist.ProcessGroup] = []
        self._gathering: dist.ProcessGroup | None = None
        constants = pipeline.weights.load(constants_of(pipeline, name))
        added = relays(pipeline)
        transport = self._connect([*operations(pipeline), *added.values()])
        mine = relays_of(self._rank, added)
        self._host = Host(make_worker(pipeline, name, constants, transport, options, relays=mine))
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(threads)
        self._thread = threading.Thread(target=self._serve, args=(timeout,), daemon=True)
        self._thread.start()

    def begin(self, call: int, inputs: Slices, finish: Finish, *, pipeline: int = 0) -> Future[Any]:
        """Queue this rank's part of a call."""
        return self._put(Call(call, inputs[self._host.slot.name], pipeline), finish)

    def load(
        self, call: int, number: int, pipeline: Pipeline, shared: Mapping[str, str]
    ) -> Future[Any]:
        """Queue the making of this rank's part of another pipeline."""
        return self._put(Load(call, number, partial(self._make_another, pipeline, shared)), None)

    def ask(
        self, call: int, function: str, arguments: Any, tensors: Slices
    ) -> Future[dict[str, Reply]]:
        """Queue a request to this rank's slot alone."""
        mine = tensors.get(self._host.slot.name, {})
        return self._put(Request(call, function, arguments, mine), None)

    def everyones(self, replies: dict[str, Reply]) -> dict[str, Reply]:
        """The replies of all ranks; every rank must ask for them."""
        if self._store is None:
            return replies
        self._gathering = self._gathering or self._make_group()
        (reply,) = replies.values()
        try:
            given = to_bytes(Answered(0, reply.value), reply.tensors)
            found = [from_bytes(each) for each in gather_bytes(given, self._gathering)]
        except (RuntimeError, EOFError, msgspec.MsgspecError) as error:
            raise WorkerError(f"a rank is gone, or answers what no rank does: {error}") from None
        return {
            slot: Reply(message.value, tensors)
            for slot, (message, tensors) in zip(self._slots, found, strict=True)
            if isinstance(message, Answered)
        }

    def _put(self, item: Item, finish: Finish | None) -> Future[Any]:
        """Queue something; ``finish`` makes a call's result, a request has none."""
        future = running_future()
        with self._lock:
            if self._error is not None:
                if isinstance(self._error, ShardwrightError):
                    raise copy(self._error)
                raise RunError(f"the worker has ended: {self._error}") from self._error
            self._calls[item.number] = (future, finish)
        self._inbox.put(item)
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
            self._host.abort()
        else:
            self._host.close()
        self._leave_groups()
        torch.set_num_threads(self._threads_before)

    def _connect(self, found: Sequence[Operation]) -> Transport:
        """Connections for a pipeline's operations."""
        if not found:
            return LoopbackTransport(Loopback())
        if self._store is None:
            self._store = _rendezvous(self._timeout) if self._owns_group else _store_of_program()
        # Other ranks may be on other machines: of their devices only the kind counts.
        devices = [torch.device(kind) for kind in self._kinds]
        return connect(
            PrefixStore(f"pipeline {next(self._pipelines)}", self._store),
            self._rank,
            devices,
            found,
            threads=self._threads,
            notify=self._inbox.ring,
            make_group=self._make_group,
        )

    def _make_group(self) -> dist.ProcessGroup:
        """Another group of all ranks; every rank must make it."""
        if dist.is_initialized():
            self._groups.append(adopt_group())
            return self._groups[-1]
        assert self._store is not None, "the ranks have met"
        return join_group(self._store, self._rank, len(self._kinds), self._kinds)

    def _leave_groups(self) -> None:
        """End the groups made here, and their threads; a program's own default group stays."""
        self._gathering = None
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        elif dist.is_initialized():
            for group in self._groups:
                dist.destroy_process_group(group)
        self._groups.clear()

    def _make_another(
        self, pipeline: Pipeline, shared: Mapping[str, str], slot: LoadedSlot
    ) -> SlotEngine:
        """The worker of another pipeline on this slot."""
        infos = constants_of(pipeline, slot.name)
        mine = {name: slot.constants[shared[name]] for name in infos if name in shared}
        stored = {name: info for name, info in infos.items() if name not in shared}
        added = relays(pipeline)
        return make_worker(
            pipeline,
            slot.name,
            {**pipeline.weights.load(stored), **mine},
            self._connect([*operations(pipeline), *added.values()]),
            self._options,
            relays=relays_of(self._rank, added),
            shares=True,
        )

    def _serve(self, timeout: float) -> None:
        try:
            serve(self._host, self._inbox, self._collect, patience=timeout)
        except Exception as error:
            error.add_note(f"on rank {self._rank}{_place(self._host.active.at)}")
            with self._lock:
                self._error = error
            for future, _ in self._calls.values():
                future.set_exception(error)

    def _collect(self, outcome: Finished | Answer) -> None:
        match outcome:
            case Finished():
                self._events.extend(outcome.events)
                future, finish = self._calls.pop(outcome.call)
                if self._rank == 0 and finish is not None:
                    # Copies: the caller may write to them, and other ranks may have the memory.
                    outputs = {
                        name: tensor.to("cpu", copy=True)
                        for name, tensor in outcome.outputs.items()
                    }
                    settle(future, finish, outputs)
                else:
                    future.set_result(None)
            case Answer():
                future, _ = self._calls.pop(outcome.number)
                if outcome.error is not None:
                    future.set_exception(outcome.error)
                else:
                    future.set_result({self._host.slot.name: outcome.reply})


def _place(at: Entry | None) -> str:
    """Where a worker was, for the end of a sentence."""
    if at is None:
        return ""
    work = "" if at.stage is None else f" of stage {at.stage}, microbatch {at.microbatch}"
    return f" in supertask {at.task!r}{work}"


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
    # Ranks that are started again find the store of those that failed, with their addresses in it.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"shardwright/{attempt}/{next(_meetings)}", store)


def _store_of_program() -> PrefixStore:
    """The store by which the ranks of the program's own default group met."""
    return PrefixStore(f"shardwright/{next(_meetings)}", default_store())


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
