"""One rank of a run that torchrun, or another launcher that sets RANK and WORLD_SIZE, has started.

Every rank makes the same calls with the same whole inputs; rank ``i`` is device slot ``i`` and runs
its worker in a thread of this process. Rank 0's future holds the result, the others' None.

Outputs of calls are brought to rank 0 by send and recv supertasks added at the end, so that they
stream, are timed and fail like all others. A step's outputs are whole only when it ends, some of
them put together of all microbatches: each is one more operation of the transports, behind those of
the file, and one more occurrence at the end of the step on both ranks (`relays`).
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from copy import copy
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from shardwright.comm import (
    Loopback,
    LoopbackTransport,
    Membership,
    Operation,
    TensorSpec,
    adopt_group,
    connect,
    gather_bytes,
    join_group,
    operations,
)
from shardwright.engine.generator import Slices
from shardwright.engine.program import Entry, Microbatching, Relay, is_training
from shardwright.engine.slot import torch_device
from shardwright.errors import LaunchError, RunError, ShardwrightError, WorkerError
from shardwright.launch.backend import START_TIMEOUT, Backend, Finish
from shardwright.launch.protocol import (
    Completed,
    EngineOptions,
    Mailbox,
    Request,
    Stop,
    from_bytes,
    to_bytes,
)
from shardwright.launch.worker import Reply, SlotLinks, SlotWorker, serve
from shardwright.pipeline import Document, Pipeline, SuperTask
from shardwright.torch_internals import default_store

_GRACE_PERIOD = 5.0
"""Seconds that a worker gets to end what it is computing when a run is given up."""

_meetings = itertools.count()
"""Numbers the rendezvous of this process; all ranks make the same runners in the same order."""


def is_torchrun() -> bool:
    """Whether this process was started as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


class TorchrunRank(Backend):
    """This process's slot."""

    def __init__(self, pipeline: Pipeline, options: EngineOptions, timeout: float) -> None:
        super().__init__(pipeline, options)
        self._rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if size != len(pipeline.devices):
            raise LaunchError(
                f"{size} ranks were started for the {len(pipeline.devices)} device slots of the "
                f"pipeline; start it with --nproc-per-node {len(pipeline.devices)} in all"
            )
        slot = self._slots[self._rank]
        self._driven = [slot]
        device = torch_device(slot, pipeline.devices[slot])
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._timeout = timeout
        self._kinds = [device.kind for device in pipeline.devices.values()]
        self._store: PrefixStore | None = None
        self._programs = itertools.count()
        self._mailbox = Mailbox()
        self._error: Exception | None = None
        self._owns_group = not dist.is_initialized()
        self._groups: list[dist.ProcessGroup] = []
        self._gathering: dist.ProcessGroup | None = None
        message, tensors = self._load_message(0, pipeline, {})
        self._worker = SlotWorker(slot, message, tensors[slot], self._connect)
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(options.threads)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def run_step(self, inputs: Slices, finish: Finish, *, program: int = 0) -> Future[Any]:
        """Start this rank's part of a call or step; the result is on rank 0 alone."""
        return super().run_step(inputs, finish if self._rank == 0 else _nothing, program=program)

    def gather(self, replies: dict[str, Reply]) -> dict[str, Reply]:
        """The replies of all ranks; every rank must ask for them."""
        if self._store is None:
            return replies
        self._gathering = self._gathering or self._make_group()
        (reply,) = replies.values()
        try:
            given = to_bytes(Completed(0, reply.value), reply.tensors)
            found = [from_bytes(each) for each in gather_bytes(given, self._gathering)]
        except (RuntimeError, EOFError, msgspec.MsgspecError) as error:
            raise WorkerError(f"a rank is gone, or answers what no rank does: {error}") from None
        return {
            slot: Reply(message.value, tensors)
            for slot, (message, tensors) in zip(self._slots, found, strict=True)
            if isinstance(message, Completed)
        }

    def close(self, *, abort: bool) -> None:
        """End the worker; with ``abort`` other ranks that need this one fail at once.

        The order is: the thread that computes, connections, groups with their threads, the store.
        """
        if not abort:
            self._wait_for_pending()
        self._mailbox.put(Stop())
        self._thread.join(_GRACE_PERIOD if abort else None)
        self._worker.close(abort=abort or self._error is not None)
        self._leave_groups()
        self._store = None
        torch.set_num_threads(self._threads_before)

    def _check_running(self) -> None:
        if isinstance(self._error, ShardwrightError):
            raise copy(self._error)
        if self._error is not None:
            raise RunError(f"the worker has ended: {self._error}") from self._error

    def _send(self, message: Request, tensors: Slices) -> None:
        (slot,) = self._driven
        self._mailbox.put(message, tensors.get(slot, {}))

    def _connect(self, document: Document) -> SlotLinks:
        """Connections for a pipeline's operations, and those that bring outputs to rank 0."""
        added = relays(document)
        found = [*operations(document), *added.values()]
        if not found:
            return SlotLinks(LoopbackTransport(Loopback()))
        if self._store is None:
            self._store = _rendezvous(self._timeout) if self._owns_group else _store_of_program()
        transport = connect(
            PrefixStore(f"pipeline {next(self._programs)}", self._store),
            self._rank,
            # Other ranks may be on other machines: of their devices only the kind counts.
            [torch.device(kind) for kind in self._kinds],
            found,
            threads=self._options.threads,
            notify=self._mailbox.notify,
            make_group=self._make_group,
        )
        return SlotLinks(transport, relays_of(self._rank, added))

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

    def _serve(self) -> None:
        try:
            serve(self._worker, self._mailbox, self._collect, self._timeout)
        except Exception as error:
            error.add_note(f"on rank {self._rank}{_position(self._worker.at)}")
            with self._lock:
                self._error = error
            self._fail_pending(error)

    def _collect(self, done: Completed, tensors: Mapping[str, Tensor]) -> None:
        if self._rank == 0:
            # Copies: the caller may write to them, and other ranks may have the memory.
            tensors = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
        self._complete(self._slots[self._rank], done, tensors)


def _nothing(outputs: object) -> None:
    """What a step returns on all ranks but the first."""


def _position(at: Entry | None) -> str:
    """Where a worker was, for the end of a sentence."""
    if at is None:
        return ""
    work = "" if at.stage is None else f" of stage {at.stage}, microbatch {at.microbatch}"
    return f" in supertask {at.task!r}{work}"


def _rendezvous(timeout: float) -> PrefixStore:
    """The store that MASTER_ADDR and MASTER_PORT name. Raises LaunchError."""
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    limit = timedelta(seconds=max(timeout, START_TIMEOUT))
    try:
        store, _, _ = next(iter(rendezvous("env://", timeout=limit)))
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


# --- outputs to rank 0 ----------------------------------------------------------------------------


def relays(document: Document) -> dict[str, Operation]:
    """The operation that brings each output of a training step to rank 0, by tensor."""
    if not is_training(document):
        return {}
    cut, slots = Microbatching.of(document), list(document.devices)
    found: dict[str, Operation] = {}
    for name, piece in document.metadata.tensor_slices.outputs.items():
        if piece.device == slots[0]:
            continue
        spec = TensorSpec.of(document.tensors[name])
        if name in cut.outputs:
            spec = TensorSpec((cut.n, *spec.shape), spec.dtype)
        found[name] = Operation(
            kind="send",
            group=f"output {name}",
            tag=len(operations(document)) + len(found),
            ranks=(slots.index(piece.device), 0),
            tasks=(f"output {name}",) * 2,
            inputs=(spec, None),
            outputs=(None, spec),
        )
    return found


def relays_of(rank: int, found: dict[str, Operation]) -> dict[Relay, Membership]:
    """A rank's part in the relays."""
    return {
        Relay(name, gives=rank != 0): Membership(operation, operation.ranks.index(rank))
        for name, operation in found.items()
        if rank in operation.ranks
    }


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
