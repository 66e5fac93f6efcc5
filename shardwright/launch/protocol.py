"""The worker protocol: what a driver tells a worker, what comes back, and what carries both.

Each message is one Struct with tensors by name beside it, the same in a queue (`Mailbox`) and in a
socket (`Connection`). What a driver asks is numbered in one order for all slots. Each slot does it
in that order, and answers each with a `Completed`. A worker that cannot go on says why in a
`Failed`, and ends.

In a socket a message is a length, a header in MessagePack (the Struct, and each tensor's name,
dtype, shape and strides) and the tensors' bytes. Bytes go from a tensor's memory to the socket and
from the socket to a new tensor's memory, without a copy between; nothing is ever unpickled.
"""

from __future__ import annotations

import socket
import struct
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from io import BytesIO
from queue import SimpleQueue
from typing import Any

import msgspec
import torch
from torch import Tensor

from shardwright.comm.transport import TensorSpec
from shardwright.comm.wire import memory_of, pack, unpack
from shardwright.engine.program import Entry
from shardwright.engine.timeline import Event
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
from shardwright.ir.tensor_meta import dtype_name, torch_dtype
from shardwright.launch.operators import OperatorSources
from shardwright.pipeline.schema import Document


class EngineOptions(msgspec.Struct, frozen=True):
    """How a worker runs: its threads, whether it records events, how many actions it begins early.

    ``lookahead`` is for training steps.
    """

    threads: int = 1
    trace: bool = False
    lookahead: int = 1


class LoadProgram(msgspec.Struct, tag=True):
    """To a worker: make its slot of a pipeline ready, under the number ``program``.

    The first is program 0. ``shared`` maps constants of a later one to those of the first. The
    tensors are the constants that are in no file; parameter files are those of
    `pipeline.weights.Weights`.
    """

    number: int
    program: int
    document: Document
    directory: str | None
    folders: tuple[str, ...] | None
    shared: dict[str, str]
    sources: OperatorSources
    options: EngineOptions


class RunStep(msgspec.Struct, tag=True):
    """To a worker: run a call, or a training step. The tensors are its slot's inputs."""

    number: int
    program: int = 0


class CallFunction(msgspec.Struct, tag=True):
    """To a worker: call ``module:function`` of this package with the slot, this and the tensors."""

    number: int
    function: str
    arguments: Any = None


class Stop(msgspec.Struct, tag=True):
    """To a worker: end."""


class Failed(msgspec.Struct, tag=True):
    """What went wrong: of one function or load, or of the worker, which ends.

    ``error`` is the name of the exception's class, ``traceback`` its whole text; the others are
    where the worker was, if anywhere.
    """

    error: str
    message: str
    traceback: str
    task: str | None = None
    tensor: str | None = None
    stage: int | None = None
    microbatch: int | None = None


class Completed(msgspec.Struct, tag=True):
    """From a worker: what was asked under a number is done.

    The tensors are a step's outputs that are made there, or belong to ``value``, which a function
    returned.
    """

    number: int
    value: Any = None
    events: list[Event] = []
    error: Failed | None = None


Request = LoadProgram | RunStep | CallFunction
Message = Request | Stop | Completed | Failed
Parcel = tuple[Message, Mapping[str, Tensor]]
"""A message with its tensors."""
Outcome = tuple[Completed, Mapping[str, Tensor]]


# --- errors ---------------------------------------------------------------------------------------

_PASSED_ON: dict[str, type[ShardwrightError]] = {
    kind.__name__: kind
    for kind in (DeviceError, GraphError, LaunchError, RunError, WeightError, WriteError)
}
"""Errors about the pipeline or the machine: they stay what they are when a worker meets them."""


def describe_failure(error: BaseException, at: Entry | None = None) -> Failed:
    """An exception as data, with the place where its worker was."""
    text = "".join(traceback.format_exception(error))
    said = "; ".join((str(error), *getattr(error, "__notes__", ())))
    return Failed(type(error).__name__, said, text, *(at or ()))


def worker_error(failed: Failed, rank: int, slot: str, *, remote: bool) -> ShardwrightError:
    """The error of what a worker says; with its traceback, where it ran in another process."""
    if failed.error in _PASSED_ON:
        kind = _PASSED_ON[failed.error]
        return kind(f"rank {rank} (device slot {slot!r}): {failed.message}")
    trace = f"\n\nOn the worker:\n{failed.traceback}" if remote else ""
    return WorkerError(
        f"{failed.error}: {failed.message}{trace}",
        rank=rank,
        task=failed.task,
        tensor=failed.tensor,
        stage=failed.stage,
        microbatch=failed.microbatch,
        lost=failed.error == WorkerError.__name__,
    )


# --- between threads ------------------------------------------------------------------------------


class Mailbox:
    """A worker's queue of messages: any thread may put, one takes.

    Its descriptor wakes a sleeper, who may sleep on a transport's sockets as well. What was put
    before a `notify` is there after it.
    """

    def __init__(self) -> None:
        self._parcels: SimpleQueue[Parcel] = SimpleQueue()
        self._wakeup, self._notifying = socket.socketpair()
        self._wakeup.setblocking(False)
        self._notifying.setblocking(False)

    @property
    def wakeup(self) -> int:
        """The descriptor that is readable from a `notify` until `drain`."""
        return self._wakeup.fileno()

    def put(self, message: Message, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Hand a message over, and wake who waits."""
        self._parcels.put((message, tensors or {}))
        self.notify()

    def notify(self) -> None:
        """Wake who waits for the descriptor."""
        with suppress(BlockingIOError):  # It is readable already.
            self._notifying.send(b"\0")

    def take(self) -> Parcel | None:
        """The next message, None where there is none."""
        return None if self._parcels.empty() else self._parcels.get()

    def drain(self) -> None:
        """Forget the notifications so far."""
        with suppress(BlockingIOError):
            while self._wakeup.recv(1 << 12):
                pass

    def __del__(self) -> None:
        self._wakeup.close()
        self._notifying.close()


# --- between processes ----------------------------------------------------------------------------

_LENGTH = struct.Struct("=Q")


class _TensorHeader(msgspec.Struct, array_like=True):
    """A tensor that follows a message's header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> _TensorHeader:
        return cls(name, dtype_name(tensor.dtype), tuple(tensor.shape), tensor.stride())

    def spec(self) -> TensorSpec:
        return TensorSpec(self.shape, torch_dtype(self.dtype), self.strides)


class _Header(msgspec.Struct):
    message: Message
    tensors: tuple[_TensorHeader, ...]


_decoder = msgspec.msgpack.Decoder(_Header)


class Connection:
    """One end of a socket. Any thread may send; one thread at a time may receive."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()

    def send(self, message: Message, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send a message and tensors by name; they come from any device. Raises OSError."""
        parts = _encode(message, tensors or {})
        with self._sending:
            for part in parts:
                self._socket.sendall(part)

    def receive(self) -> tuple[Message, dict[str, Tensor]]:
        """The next message and its tensors. Raises EOFError where the other end is gone."""
        return _decode(self._fill)

    def close(self) -> None:
        """End the connection; who reads or writes at either end is woken."""
        with suppress(OSError):  # The other end may have been faster.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _fill(self, memory: bytearray | memoryview) -> None:
        view = memoryview(memory)
        while view:
            try:
                count = self._socket.recv_into(view, 0, socket.MSG_WAITALL)
            except OSError as error:
                raise EOFError(str(error)) from None
            if not count:
                raise EOFError("the other end is closed")
            view = view[count:]


def to_bytes(message: Message, tensors: Mapping[str, Tensor]) -> bytes:
    """A message and its tensors as they go over a socket."""
    return b"".join(_encode(message, tensors))


def from_bytes(content: bytes) -> tuple[Message, dict[str, Tensor]]:
    """The inverse of `to_bytes`. Raises EOFError, or msgspec's errors, for anything else."""
    stream = BytesIO(content)

    def fill(memory: bytearray | memoryview) -> None:
        if stream.readinto(memory) < len(memory):
            raise EOFError(f"a message ends after {len(content)} bytes")

    return _decode(fill)


def _encode(message: Message, tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The length of the header, the header, and the content of each tensor."""
    contents = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    headers = tuple(_TensorHeader.of(name, tensor) for name, tensor in contents.items())
    text = msgspec.msgpack.encode(_Header(message, headers))
    yield _LENGTH.pack(len(text)) + text
    for header, tensor in zip(headers, contents.values(), strict=True):
        yield memory_of(pack(tensor, header.spec()))


def _decode(
    fill: Callable[[bytearray | memoryview], None],
) -> tuple[Message, dict[str, Tensor]]:
    """A message, from what fills the memory it is given with what comes next."""
    length = bytearray(_LENGTH.size)
    fill(length)
    text = bytearray(_LENGTH.unpack(length)[0])
    fill(text)
    header = _decoder.decode(text)
    tensors = {}
    for item in header.tensors:
        spec = item.spec()
        content = torch.empty(spec.nbytes, dtype=torch.uint8)
        fill(memory_of(content))
        tensors[item.name] = unpack(content, spec)
    return header.message, tensors
