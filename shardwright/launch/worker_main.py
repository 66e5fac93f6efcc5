"""A worker process: ``python -m shardwright.launch.worker_main SOCKET BOARD STORE RANK SIZE``.

It is started with the descriptors of its end of a socket, of the notice board and of the store by
which the ranks meet. It gets its slot by a `LoadProgram`, which it answers as any other, then does
what it is asked until `Stop`. If it fails it says so in a `Failed`; if the driver is gone it ends
at once, whatever it is doing.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import sys
import threading
from collections.abc import Mapping
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from shardwright.comm import (
    Loopback,
    LoopbackTransport,
    adopt_group,
    connect,
    join_group,
    open_store,
    operations,
)
from shardwright.engine.board import Board, State
from shardwright.engine.slot import torch_device
from shardwright.launch.protocol import (
    Completed,
    Connection,
    LoadProgram,
    Mailbox,
    Parcel,
    Stop,
    describe_failure,
)
from shardwright.launch.worker import SlotLinks, SlotWorker, serve
from shardwright.pipeline.schema import Document


class WorkerProcess:
    """One worker and its threads: one listens to the driver, one answers, this one computes."""

    def __init__(self, connection: Connection, board: Board, store: int, rank: int) -> None:
        self._connection = connection
        self._board = board
        self._store_file = store
        self._rank = rank
        self._mailbox = Mailbox()
        self._outbox: SimpleQueue[Parcel | None] = SimpleQueue()
        self._worker: SlotWorker | None = None
        self._store: Store | None = None
        self._programs = itertools.count()

    def run(self) -> None:
        """Everything from the first message to `Stop`. Does not raise."""
        try:
            first, tensors = self._connection.receive()
            assert isinstance(first, LoadProgram), "the first message says what to be"
            self._run(first, tensors)
        except EOFError:
            return  # The driver is gone.
        except BaseException as error:
            self._report(error)

    def _run(self, first: LoadProgram, tensors: dict[str, Tensor]) -> None:
        self._threads = first.options.threads
        torch.set_num_threads(self._threads)
        slot, device = list(first.document.devices.items())[self._rank]
        if device.kind == "cuda":
            torch.cuda.set_device(torch_device(slot, device))
        self._worker = SlotWorker(slot, first, tensors, self._connect, self._board)
        threading.Thread(target=self._listen, name="listen", daemon=True).start()
        answering = threading.Thread(target=self._answer, name="answer", daemon=True)
        answering.start()
        self._board.write(State.IDLE)
        self._tell(Completed(first.number), {})
        serve(self._worker, self._mailbox, self._tell)
        self._outbox.put(None)
        answering.join()
        self._worker.close()

    def _connect(self, document: Document) -> SlotLinks:
        """Connections for a pipeline; keys of their own in the store keep several apart."""
        found = operations(document)
        if not found:
            return SlotLinks(LoopbackTransport(Loopback()))
        store = self._store = self._store or open_store(self._store_file)
        kinds = [device.kind for device in document.devices.values()]

        def make_group() -> dist.ProcessGroup:
            if dist.is_initialized():
                return adopt_group()
            return join_group(store, self._rank, len(kinds), kinds)

        transport = connect(
            PrefixStore(f"pipeline {next(self._programs)}", store),
            self._rank,
            [torch_device(name, device) for name, device in document.devices.items()],
            found,
            threads=self._threads,
            notify=self._mailbox.notify,
            make_group=make_group,
        )
        return SlotLinks(transport)

    def _listen(self) -> None:
        """Hand messages to the worker as they come."""
        try:
            while True:
                message, tensors = self._connection.receive()
                self._mailbox.put(message, tensors)
                if isinstance(message, Stop):
                    return
        except EOFError:
            os._exit(1)  # The driver is gone, and this process may be in the middle of anything.

    def _tell(self, message: Completed, tensors: Mapping[str, Tensor]) -> None:
        self._outbox.put((message, tensors))

    def _answer(self) -> None:
        """Send what is done while the worker goes on."""
        try:
            while (parcel := self._outbox.get()) is not None:
                self._connection.send(*parcel)
        except OSError:
            os._exit(1)  # The driver is gone.
        except BaseException as error:
            self._report(error)
            os._exit(1)

    def _report(self, error: BaseException) -> None:
        """Tell the driver what went wrong and where."""
        try:
            self._connection.send(
                describe_failure(error, self._worker.at if self._worker else None)
            )
        except OSError:
            return  # Nobody is left to hear it.


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
    WorkerProcess(connection, Board.attach(board, rank, size), store, rank).run()
    connection.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
