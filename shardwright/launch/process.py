"""A worker process: ``python -m shardwright.launch.process SOCKET BOARD STORE RANK SIZE``.

`launch` starts it with the descriptors of its end of a socket, of the notice board and of the store
by which the ranks meet. It gets its slot by a `Start` message, answers `Ready`, then does what it
is asked until `Stop`. If it fails it says so in a `Failed` message; if the driver is gone it ends
at once, whatever it is doing.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import sys
import threading
from functools import partial
from queue import SimpleQueue

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from shardwright.comm import (
    Loopback,
    LoopbackTransport,
    Transport,
    adopt_group,
    connect,
    join_group,
    open_store,
    operations,
)
from shardwright.engine.board import Board, State
from shardwright.engine.program import constants_of
from shardwright.engine.slot import LoadedSlot, torch_device
from shardwright.engine.slot_engine import Finished, SlotEngine
from shardwright.launch.connection import (
    Another,
    Answered,
    Ask,
    Begin,
    Connection,
    Done,
    Message,
    Ready,
    Start,
)
from shardwright.launch.failures import failed
from shardwright.launch.host import Answer, Call, Host, Item, Load, Request
from shardwright.launch.inbox import End, Inbox
from shardwright.launch.making import Options, make_worker
from shardwright.launch.operators import load_operators
from shardwright.launch.serve import serve
from shardwright.pipeline.schema import Document
from shardwright.pipeline.weights import Weights

Outbox = SimpleQueue[Finished | Answer | None]


class WorkerProcess:
    """One worker and its threads: one listens to the driver, one answers, this one computes."""

    def __init__(self, connection: Connection, board: Board, store: int) -> None:
        self._connection = connection
        self._board = board
        self._store_file = store
        self._inbox = Inbox()
        self._outbox: Outbox = SimpleQueue()
        self._host: Host | None = None
        self._store: Store | None = None
        self._meetings = itertools.count()

    def run(self) -> None:
        """Everything from `Start` to `Stop`. Does not raise."""
        try:
            start, constants = self._connection.receive()
            assert isinstance(start, Start), "the first message says what to be"
            self._run(start, constants)
        except EOFError:
            return  # The driver is gone.
        except BaseException as error:
            self._report(error)

    def _run(self, start: Start, constants: dict[str, Tensor]) -> None:
        self._board.write(State.STARTING)
        document = msgspec.json.decode(start.document, type=Document)
        load_operators(document, start.sources.modules, start.sources.script)
        torch.set_num_threads(start.threads)  # Whatever those modules have set.
        contents = _load(start.rank, document, start.directory, constants)
        self._board.write(State.STARTING)
        name = list(document.devices)[start.rank]
        self._host = Host(
            make_worker(
                document,
                name,
                contents,
                self._connect(start, document),
                Options(start.trace, start.lookahead),
                board=self._board,
            )
        )
        threading.Thread(target=self._listen, args=(start,), name="listen", daemon=True).start()
        answering = threading.Thread(target=self._answer, name="answer", daemon=True)
        answering.start()
        self._board.write(State.IDLE)
        self._connection.send(Ready())
        serve(self._host, self._inbox, self._outbox.put)
        self._outbox.put(None)
        answering.join()
        self._host.close()

    def _connect(self, start: Start, document: Document) -> Transport:
        """Connections for a pipeline; keys of their own in the store keep several apart."""
        found = operations(document)
        if not found:
            return LoopbackTransport(Loopback())
        store = self._store = self._store or open_store(self._store_file)
        kinds = [device.kind for device in document.devices.values()]

        def make_group() -> dist.ProcessGroup:
            if dist.is_initialized():
                return adopt_group()
            return join_group(store, start.rank, len(kinds), kinds)

        return connect(
            PrefixStore(f"pipeline {next(self._meetings)}", store),
            start.rank,
            [torch_device(name, device) for name, device in document.devices.items()],
            found,
            threads=start.threads,
            notify=self._inbox.ring,
            make_group=make_group,
        )

    def _listen(self, start: Start) -> None:
        """Hand what is asked to the host as it comes."""
        try:
            while True:
                item = self._item(start, *self._connection.receive())
                self._inbox.put(item or End())
                if item is None:
                    return
        except EOFError:
            os._exit(1)  # The driver is gone, and this process may be in the middle of anything.

    def _item(self, start: Start, message: Message, tensors: dict[str, Tensor]) -> Item | None:
        """What a message asks for; None at the end."""
        match message:
            case Begin():
                return Call(message.call, tensors, message.pipeline)
            case Ask():
                return Request(message.call, message.function, message.arguments, tensors)
            case Another():
                make = partial(self._make_another, start, message, tensors)
                return Load(message.call, message.pipeline, make)
        return None

    def _make_another(
        self, start: Start, message: Another, tensors: dict[str, Tensor], slot: LoadedSlot
    ) -> SlotEngine:
        """The worker of another pipeline on this slot."""
        document = msgspec.json.decode(message.document, type=Document)
        load_operators(document, message.sources.modules, message.sources.script)
        torch.set_num_threads(start.threads)
        mine = {
            name: slot.constants[message.shared[name]]
            for name in constants_of(document, slot.name)
            if name in message.shared
        }
        return make_worker(
            document,
            slot.name,
            _load(start.rank, document, message.directory, tensors | mine),
            self._connect(start, document),
            Options(start.trace, start.lookahead),
            board=self._board,
            shares=True,
        )

    def _answer(self) -> None:
        """Send what is over while the host goes on."""
        try:
            while (outcome := self._outbox.get()) is not None:
                if isinstance(outcome, Finished):
                    self._connection.send(Done(outcome.call, outcome.events), outcome.outputs)
                elif outcome.error is None:
                    reply = outcome.reply
                    self._connection.send(Answered(outcome.number, reply.value), reply.tensors)
                else:
                    self._connection.send(Answered(outcome.number, error=failed(outcome.error)))
        except OSError:
            os._exit(1)  # The driver is gone.
        except BaseException as error:
            self._report(error)
            os._exit(1)

    def _report(self, error: BaseException) -> None:
        """Tell the driver what went wrong and where."""
        try:
            self._connection.send(failed(error, self._host.active.at if self._host else None))
        except OSError:
            return  # Nobody is left to hear it.


def _load(
    rank: int, document: Document, directory: str | None, constants: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The contents of a slot's constants: those that are given, and the others from files."""
    name = list(document.devices)[rank]
    device = torch_device(name, document.devices[name])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    infos = constants_of(document, name)
    stored = {key: info for key, info in infos.items() if key not in constants}
    return Weights(directory).load(stored) | constants


def end_with(driver: int) -> None:
    """Sleep until the process of a descriptor has ended, then end this one, whatever it is doing.

    A connection says so too, but only when every process has closed it that the driver has forked,
    such as those of a DataLoader.
    """
    watched = select.poll()
    watched.register(driver, select.POLLIN)
    watched.poll()
    os._exit(1)


def main(arguments: list[str]) -> None:
    """Run the worker that the arguments describe, and leave without looking back."""
    descriptor, board, store, rank, size = map(int, arguments)
    connection = Connection(socket.socket(fileno=descriptor))
    WorkerProcess(connection, Board.attach(board, rank, size), store).run()
    connection.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
