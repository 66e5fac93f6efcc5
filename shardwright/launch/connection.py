"""Messages with tensors over a socket between the driver and a worker.

A message is a length, a header in MessagePack (the message's Struct and each tensor's name, dtype,
shape and strides) and the tensors' bytes. Bytes go from a tensor's memory to the socket and from
the socket to a new tensor's memory, without a copy between; nothing is ever unpickled.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from io import BytesIO
from typing import Any

import msgspec
import torch
from torch import Tensor

from shardwright.comm.transport import TensorSpec
from shardwright.comm.wire import memory_of, pack, unpack
from shardwright.engine.timeline import Event
from shardwright.ir.tensor_meta import dtype_name, torch_dtype
from shardwright.launch.operators import Sources

_LENGTH = struct.Struct("=Q")


class Start(msgspec.Struct, tag=True):
    """To a worker: what it is to be. The tensors are constants that are in no file.

    ``document`` is the pipeline as JSON, ``directory`` where paths of parameter files begin;
    ``lookahead`` is for training steps, see `step_worker`.
    """

    rank: int
    document: bytes
    directory: str | None
    threads: int
    trace: bool
    sources: Sources
    lookahead: int


class Begin(msgspec.Struct, tag=True):
    """To a worker: run a call. The tensors are its slot's inputs of the pipeline of that number."""

    call: int
    pipeline: int = 0


class Another(msgspec.Struct, tag=True):
    """To a worker: keep ready another pipeline, on the same slots and constants.

    ``shared`` maps its constants to the worker's own; the tensors are those that are in no file.
    """

    call: int
    pipeline: int
    document: bytes
    directory: str | None
    shared: dict[str, str]
    sources: Sources


class Ask(msgspec.Struct, tag=True):
    """To a worker: call a function with the slot, these arguments and the tensors."""

    call: int
    function: str
    arguments: Any


class Stop(msgspec.Struct, tag=True):
    """To a worker: end."""


class Ready(msgspec.Struct, tag=True):
    """From a worker: it has loaded its slot and reaches the others."""


class Done(msgspec.Struct, tag=True):
    """From a worker: it has finished a call. The tensors are the pipeline outputs made there."""

    call: int
    events: list[Event]


class Failed(msgspec.Struct, tag=True):
    """From a worker: it has failed, and ends.

    ``error`` is the name of the exception's class, ``traceback`` its whole text; the others are
    where it was, if anywhere.
    """

    error: str
    message: str
    traceback: str
    task: str | None = None
    tensor: str | None = None
    stage: int | None = None
    microbatch: int | None = None


class Answered(msgspec.Struct, tag=True):
    """From a worker: what came of `Ask` or `Another`. The tensors belong to ``value``."""

    call: int
    value: Any = None
    error: Failed | None = None


Message = Start | Begin | Another | Ask | Stop | Ready | Done | Failed | Answered


class _Described(msgspec.Struct, array_like=True):
    """A tensor that follows a header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def spec(self) -> TensorSpec:
        return TensorSpec(self.shape, torch_dtype(self.dtype), self.strides)


class _Header(msgspec.Struct):
    message: Message
    tensors: tuple[_Described, ...]


_decoder = msgspec.msgpack.Decoder(_Header)


Memory = bytearray | memoryview


class Connection:
    """One end of a socket. Any thread may send; one thread at a time may receive."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()

    def send(self, message: Message, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send a message and tensors by name; they come from any device. Raises OSError."""
        parts = _written(message, tensors or {})
        with self._sending:
            for part in parts:
                self._socket.sendall(part)

    def receive(self) -> tuple[Message, dict[str, Tensor]]:
        """The next message and its tensors. Raises EOFError where the other end is gone."""
        return _read(self._fill)

    def close(self) -> None:
        """End the connection; whoever reads or writes at either end notices."""
        with suppress(OSError):  # The other end may have been faster.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _fill(self, memory: Memory) -> None:
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
    return b"".join(_written(message, tensors))


def from_bytes(content: bytes) -> tuple[Message, dict[str, Tensor]]:
    """What `to_bytes` has written. Raises EOFError, or msgspec's errors, for anything else."""
    stream = BytesIO(content)

    def fill(memory: Memory) -> None:
        if stream.readinto(memory) < len(memory):
            raise EOFError(f"a message ends after {len(content)} bytes")

    return _read(fill)


def _written(message: Message, tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The length of the header, the header, and the content of each tensor."""
    contents = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    described = tuple(_describe(name, tensor) for name, tensor in contents.items())
    header = msgspec.msgpack.encode(_Header(message, described))
    yield _LENGTH.pack(len(header)) + header
    for item, tensor in zip(described, contents.values(), strict=True):
        yield memory_of(pack(tensor, item.spec()))


def _read(fill: Callable[[Memory], None]) -> tuple[Message, dict[str, Tensor]]:
    """A message, from what fills the memory it is given with what comes next."""
    head = bytearray(_LENGTH.size)
    fill(head)
    text = bytearray(_LENGTH.unpack(head)[0])
    fill(text)
    header = _decoder.decode(text)
    tensors = {}
    for item in header.tensors:
        spec = item.spec()
        content = torch.empty(spec.nbytes, dtype=torch.uint8)
        fill(memory_of(content))
        tensors[item.name] = unpack(content, spec)
    return header.message, tensors


def _describe(name: str, tensor: Tensor) -> _Described:
    return _Described(name, dtype_name(tensor.dtype), tuple(tensor.shape), tensor.stride())
