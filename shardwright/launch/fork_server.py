"""A process that has imported what workers need, and forks one whenever the driver asks.

Importing torch takes seconds, a fork takes milliseconds: the first workers of a driver start as
fast as one process of Python, all later ones at once, and what they have imported lies in memory
once. The driver's side is `spawn`.

It is ``python -m shardwright.launch.fork_server SOCKET DRIVER``, where the second is a descriptor
of the driver's process. Each `ForkRequest` comes with six descriptors: the worker's end of its
connection, the notice board, the store, standard output and error, and a pipe. The answer is the
worker's process id with a pidfd of it; how it ended is written to the pipe.

Invariant: torch does no work here, so that a fork copies no thread's work half done (what
NumPy's libraries start, they stop for a fork); of another worker's descriptors a worker has none;
when the driver is gone this process ends, and so do the workers, who watch it by themselves.
"""

from __future__ import annotations

import gc
import os
import random
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy

from shardwright.launch import worker_main
from shardwright.launch.spawn import DESCRIPTORS, LENGTH, PID, STATUS, ForkRequest
from shardwright.torch_internals import preload_compiler


class ForkServer:
    """Forks what comes from a connection to the driver; ``process`` is a descriptor of that."""

    def __init__(self, driver: socket.socket, process: int) -> None:
        self._driver = driver
        self._process = process
        self._poll = select.poll()
        self._poll.register(driver, select.POLLIN)
        self._poll.register(process, select.POLLIN)
        self._workers: dict[int, tuple[int, int]] = {}
        """By the descriptor that tells of its end: a worker's process id, and its pipe."""

    def serve(self) -> None:
        """Fork workers and note their ends, until the driver is gone."""
        with suppress(ConnectionError):
            while True:
                for descriptor, _ in self._poll.poll():
                    if descriptor in self._workers:
                        self._reap(descriptor)
                    elif descriptor == self._process or not self._take():
                        return

    def _take(self) -> bool:
        """Fork what the driver asks for; False where it is gone."""
        head, descriptors, _, _ = socket.recv_fds(self._driver, LENGTH.size, DESCRIPTORS)
        if not head:
            return False
        size = LENGTH.unpack(head)[0]
        text = self._driver.recv(size, socket.MSG_WAITALL)
        if len(text) < size:
            return False
        request = msgspec.msgpack.decode(text, type=ForkRequest)
        pid = os.fork()
        if pid == 0:
            self._forget_others()
            _become(request, descriptors, self._process)
        *others, pipe = descriptors
        for descriptor in others:
            os.close(descriptor)
        watch = os.pidfd_open(pid)
        self._workers[watch] = pid, pipe
        self._poll.register(watch, select.POLLIN)
        socket.send_fds(self._driver, [PID.pack(pid)], [watch])
        return True

    def _reap(self, watch: int) -> None:
        """A worker has ended: say how."""
        pid, pipe = self._workers.pop(watch)
        self._poll.unregister(watch)
        os.close(watch)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(BrokenPipeError):  # Nobody wants to know.
            os.write(pipe, STATUS.pack(code))
        os.close(pipe)

    def _forget_others(self) -> None:
        """In a worker: close what is the server's."""
        self._driver.close()
        for watch, (_, pipe) in self._workers.items():
            os.close(watch)
            os.close(pipe)


def _become(request: ForkRequest, descriptors: Sequence[int], driver: int) -> None:
    """Be a worker, as long as the driver's process is there. Never returns."""
    code = 1
    try:
        *shared, output, errors, pipe = descriptors
        os.close(pipe)
        for given, standard in ((output, 1), (errors, 2)):
            os.dup2(given, standard)
            os.close(given)
        with suppress(OSError):
            Path("/proc/self/comm").write_text(f"sw rank {request.rank}")  # What `top` shows.
        os.setpgid(0, 0)  # The terminal's Ctrl-C is for the driver, which ends its workers.
        os.environb.clear()
        os.environb.update(request.environment)
        os.chdir(request.folder)
        sys.path[:] = map(os.fsdecode, request.path)
        random.seed()
        numpy.random.seed()
        threading.Thread(target=worker_main.end_with, args=(driver,), daemon=True).start()
        worker_main.main([str(number) for number in (*shared, request.rank, request.size)])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main(arguments: Sequence[str]) -> None:
    """Serve the driver at the other end of a descriptor; end with it, and at once."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # A driver that ignores it passes that on.
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # What comes later must not be taken for standard output.
    os.close(number)
    preload_compiler()  # Else each worker would, when it first runs a custom operator.
    gc.collect()
    gc.freeze()  # Else the first collection in a worker would copy all that was imported.
    connection, driver = map(int, arguments)
    ForkServer(socket.socket(fileno=connection), driver).serve()
    os._exit(0)  # What torch has imported takes seconds to be taken apart.


if __name__ == "__main__":
    main(sys.argv[1:])
