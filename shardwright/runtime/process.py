"""A worker process: ``python -m shardwright.runtime.process SOCKET BOARD RANK SIZE``.

`launch` starts it with the descriptors of its end of a socket and of the notice board. It gets its
slot by a `Start` message, answers `Ready`, then runs calls until `Stop`. If it fails it says so in
a `Failed` message; if the driver is gone it ends at once, whatever it is doing.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import traceback
from queue import SimpleQueue

import msgspec
import torch
from torch import Tensor

from shardwright.comm import (
    DistributedTransport,
    LocalTransport,
    Switchboard,
    Transport,
    join_group,
    open_store,
    operations,
)
from shardwright.pipeline.schema import Document
from shardwright.pipeline.weights import Weights
from shardwright.runtime.board import Board, State
from shardwright.runtime.connection import (
    Begin,
    Connection,
    Done,
    Failed,
    Ready,
    Start,
)
from shardwright.runtime.operators import load_operators
from shardwright.runtime.serve import Call, End, Inbox, Wake, serve
from shardwright.runtime.slot import Slot, constants_of, make_slot, torch_device
from shardwright.runtime.worker import Finished, Worker

Outbox = SimpleQueue[Finished | None]


class WorkerProcess:
    """One worker and its threads: one listens to the driver, one answers, this one computes."""

    def __init__(self, connection: Connection, board: Board) -> None:
        self._connection = connection
        self._board = board
        self._inbox: Inbox = SimpleQueue()
        self._outbox: Outbox = SimpleQueue()
        self._worker: Worker | None = None

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
        torch.set_num_threads(start.threads)
        document = msgspec.json.decode(start.document, type=Document)
        load_operators(document, start.modules)
        slot = _load(start, document, constants)
        self._board.write(State.STARTING)
        transport = self._connect(start, document)
        self._worker = Worker(slot, transport, trace=start.trace, board=self._board)
        threading.Thread(target=self._listen, name="listen", daemon=True).start()
        answering = threading.Thread(target=self._answer, name="answer", daemon=True)
        answering.start()
        self._board.write(State.IDLE)
        self._connection.send(Ready())
        serve(self._worker, self._inbox, self._outbox.put)
        self._outbox.put(None)
        answering.join()
        transport.close()

    def _connect(self, start: Start, document: Document) -> Transport:
        if start.port is None:
            return LocalTransport(Switchboard())
        store = open_store(start.port)
        kinds = [device.kind for device in document.devices.values()]
        group = join_group(store, start.rank, len(kinds), kinds)
        devices = [torch_device(name, device) for name, device in document.devices.items()]
        return DistributedTransport(
            group, start.rank, devices, operations(document), lambda: self._inbox.put(Wake())
        )

    def _listen(self) -> None:
        """Hand calls to the worker as they come."""
        try:
            while True:
                message, tensors = self._connection.receive()
                if not isinstance(message, Begin):
                    self._inbox.put(End())
                    return
                self._inbox.put(Call(message.call, tensors))
        except EOFError:
            os._exit(1)  # The driver is gone, and this process may be in the middle of anything.

    def _answer(self) -> None:
        """Send what is finished while the worker goes on."""
        try:
            while (finished := self._outbox.get()) is not None:
                self._connection.send(Done(finished.call, finished.events), finished.outputs)
        except OSError:
            os._exit(1)  # The driver is gone.
        except BaseException as error:
            self._report(error)
            os._exit(1)

    def _report(self, error: BaseException) -> None:
        """Tell the driver what went wrong and where."""
        step = self._worker.at if self._worker is not None else None
        failed = Failed(
            type(error).__name__,
            str(error),
            "".join(traceback.format_exception(error)),
            step.task if step is not None else None,
            step.tensor if step is not None else None,
        )
        try:
            self._connection.send(failed)
        except OSError:
            return  # Nobody is left to hear it.


def _load(start: Start, document: Document, constants: dict[str, Tensor]) -> Slot:
    name = list(document.devices)[start.rank]
    device = torch_device(name, document.devices[name])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    infos = constants_of(document, name)
    stored = {key: info for key, info in infos.items() if key not in constants}
    return make_slot(document, name, Weights(start.directory).load(stored) | constants)


def main(arguments: list[str]) -> None:
    """Run the worker that the arguments describe, and leave without looking back."""
    descriptor, board, rank, size = map(int, arguments)
    connection = Connection(socket.socket(fileno=descriptor))
    WorkerProcess(connection, Board.attach(board, rank, size)).run()
    connection.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
