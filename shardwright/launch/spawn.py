"""Starting worker processes, and ending them.

A worker is forked from a process that has imported what it needs (`fork_server`), or where that
cannot be it is ``python -m shardwright.launch.worker_main``. It has three descriptors: its end of a
pair of sockets, the notice board, and the store by which the workers find each other. All of them
are inherited; so there is no port, no path and no secret by which anybody else could reach it,
scripts and notebooks need no ``__main__`` guard, and the kernel tells the driver at once when it
dies.

The fork server starts with the first worker and ends with this process. There is another one for
each change of what libraries read of the environment when they are loaded. Variables, module path,
working directory and standard output a worker has from the driver as they are now; limits and
priorities are those of the server's start.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
from torch import Tensor

from shardwright.errors import LaunchError
from shardwright.launch.protocol import Connection, Message

_WORKER = "shardwright.launch.worker_main"
_SERVER = "shardwright.launch.fork_server"

_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""Bytes, for glibc: a worker makes the same tensors in every call, so it keeps their memory rather
than give it back and have the kernel clear fresh pages (a tenth of the time of a transformer)."""


@dataclass(frozen=True, slots=True)
class WorkerHandle:
    """A worker process and the driver's end of the connection to it."""

    rank: int
    process: subprocess.Popen[bytes] | ForkedProcess
    connection: Connection

    def tell(self, message: Message, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send a message, unless the process is gone, which who listens to it finds out."""
        with suppress(OSError):
            self.connection.send(message, tensors)

    def ending(self) -> str:
        """How the process ended, or that it has not; waits a moment for the kernel to say."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(2)
        code = self.process.returncode
        if code is None:
            return "it closed its connection"
        if code >= 0:
            return f"its process ended with exit code {code}"
        name = signal.Signals(-code).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"its process was killed by {name}{hint}"

    @property
    def is_stopped(self) -> bool:
        """Whether the process is held still, as by SIGSTOP; False where no ``/proc`` says so."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in ("T", "t")


def start_workers(size: int, threads: int, board: int, store: int) -> list[WorkerHandle]:
    """Start ``size`` workers that compute with ``threads`` threads each. Raises LaunchError.

    ``board`` and ``store`` are the descriptors of what they share.
    """
    workers: list[WorkerHandle] = []
    try:
        for rank in range(size):
            workers.append(_start_one(rank, size, threads, (board, store)))
    except BaseException as error:
        end_workers(workers, 0.0)
        if not isinstance(error, OSError):
            raise
        raise LaunchError(f"worker {len(workers)} of {size} cannot be started: {error}") from None
    return workers


def end_workers(workers: Sequence[WorkerHandle], grace_period: float) -> None:
    """Give the workers so many seconds to end by themselves, then kill and reap them."""
    deadline = time.monotonic() + grace_period
    try:
        for worker in workers:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.wait()
            worker.connection.close()


def _start_one(rank: int, size: int, threads: int, shared: tuple[int, int]) -> WorkerHandle:
    ours, theirs = socket.socketpair()
    start = fork_worker if can_fork() else _start_python
    try:
        process = start(rank, size, (theirs.fileno(), *shared), _environment(threads))
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return WorkerHandle(rank, process, Connection(ours))


def _start_python(
    rank: int, size: int, descriptors: tuple[int, ...], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """A worker as a Python of its own."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", _WORKER, *map(str, (*descriptors, rank, size))],
        stdin=subprocess.DEVNULL,
        pass_fds=descriptors,
        env=environment,
        process_group=0,  # The terminal's Ctrl-C is for the driver, which ends its workers.
    )


def _environment(threads: int) -> dict[str, str]:
    """The driver's environment and module path; local ranks meet on the loopback interface."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    environment = {
        **_MALLOC,
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "OMP_NUM_THREADS": str(threads),
    }
    if loopback is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
    return environment


# --- forked from a server -------------------------------------------------------------------------

_READ_AT_LOAD = (
    *("ATEN", "CUDA", "GLIBC", "GOMP", "KMP", "LD_", "MALLOC", "MKL", "OMP", "OPENBLAS", "PYTHON"),
    *("PYTORCH", "TORCH"),
)
"""How names of variables begin that are read once, when torch is loaded."""
_IN_SERVER = {"OMP_NUM_THREADS": "1"}
"""A server computes nothing; its workers say by themselves with how many threads they do."""
_PATIENCE = 2.0
"""Seconds that a server gets to end when its connection has ended."""
_LOST = 255
"""The exit code of a worker of which nobody says how it ended."""


LENGTH = struct.Struct("=Q")
PID = struct.Struct("=q")
STATUS = struct.Struct("=i")
DESCRIPTORS = 6
"""Those that come with a `ForkRequest`; see `fork_server`."""


class ForkRequest(msgspec.Struct, frozen=True):
    """A worker to start: its rank of ``size``, and what its process begins with.

    ``environment`` are all variables, ``path`` is `sys.path`, ``folder`` the working directory, as
    bytes, which need not be text.
    """

    rank: int
    size: int
    environment: dict[bytes, bytes]
    path: tuple[bytes, ...]
    folder: bytes


class ForkedProcess:
    """A worker process, as far as one of `subprocess.Popen` is needed.

    ``status`` is the end of the pipe from which the server's word of its end is read. ``process``
    is the server's pidfd: by its number, a process that has ended could be taken for a later one.
    """

    def __init__(self, pid: int, status: int, process: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self._status = status
        self._process = process
        weakref.finalize(self, _close, status, process)

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended; its exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            watched = select.poll()
            watched.register(self._process, select.POLLIN)
            if not watched.poll(None if timeout is None else 1e3 * timeout):
                assert timeout is not None, "without a limit one waits for the end"
                raise subprocess.TimeoutExpired(f"worker of process {self.pid}", timeout)
        with self._lock:
            if self.returncode is None:
                said = os.read(self._status, STATUS.size)
                self.returncode = STATUS.unpack(said)[0] if said else _LOST
            return self.returncode

    def kill(self) -> None:
        """End the process now, if it runs."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


@cache
def can_fork() -> bool:
    """Whether this system tells of a process's end by a descriptor, as Linux does since 5.3.

    Where it does not, or forbids it, libraries may not bear a fork either.
    """
    try:
        watched = os.pidfd_open(os.getpid())
        try:
            signal.pidfd_send_signal(watched, 0)
        finally:
            os.close(watched)
    except (AttributeError, OSError):
        return False
    return True


class _ForkServerClient:
    """A fork server's process and the connection to it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._connection, theirs = map(_no_standard, socket.socketpair())
        driver = os.pidfd_open(os.getpid())
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _SERVER, str(theirs.fileno()), str(driver)],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), driver),
                env=environment,
                process_group=0,  # The terminal's Ctrl-C is for the driver.
            )
        except OSError:
            self._connection.close()
            raise
        finally:
            theirs.close()
            os.close(driver)

    @property
    def is_there(self) -> bool:
        """Whether the server runs."""
        return self._process.poll() is None

    def fork(self, request: ForkRequest, descriptors: tuple[int, ...]) -> ForkedProcess:
        """Start a worker with these descriptors. Raises LaunchError where the server has ended."""
        text = msgspec.msgpack.encode(request)
        ours, theirs = os.pipe()
        with ExitStack() as stack:
            closing = stack.enter_context(ExitStack())
            closing.callback(os.close, ours)
            stack.callback(os.close, theirs)
            output, errors = (stack.enter_context(_standard(number)) for number in (1, 2))
            try:
                given = [*descriptors, output, errors, theirs]
                socket.send_fds(self._connection, [LENGTH.pack(len(text))], given)
                self._connection.sendall(text)
                flags = socket.MSG_WAITALL | socket.MSG_CMSG_CLOEXEC
                answer, watched, _, _ = socket.recv_fds(self._connection, PID.size, 1, flags)
            except OSError:
                answer = b""
            except BaseException:
                self.end()  # What it answers belongs to nobody any more.
                raise
            if not answer:
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_PATIENCE)
                self.end()
                raise LaunchError(
                    "the process that workers are forked from ended with exit code "
                    f"{self._process.returncode}; what it printed says more"
                )
            if not watched:  # The worker ends with its connection.
                raise LaunchError("this process has no file descriptor left: raise `ulimit -n`")
            closing.pop_all()
            return ForkedProcess(PID.unpack(answer)[0], ours, watched[0])

    def forget(self) -> None:
        """In a forked copy of this process: let go of what is the original's."""
        self._connection.close()
        self._process.returncode = 0  # Else it would be missed: it is no child of this process.

    def end(self) -> None:
        """End the server; its workers go on."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


def _no_standard(connection: socket.socket) -> socket.socket:
    """The connection, under a number that is not one of the three standard ones."""
    if connection.fileno() > 2:
        return connection
    with connection:
        return socket.socket(fileno=fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, 3))


@contextmanager
def _standard(number: int) -> Iterator[int]:
    """Standard output or error; where a program started here would have none, what takes all."""
    try:
        is_passed_on = os.get_inheritable(number)
    except OSError:
        is_passed_on = False
    if is_passed_on:
        yield number
    else:
        with open(os.devnull, "wb") as nothing:
            yield nothing.fileno()


_servers: dict[frozenset[tuple[str, str]], _ForkServerClient] = {}
_lock = threading.Lock()


def fork_worker(
    rank: int, size: int, descriptors: tuple[int, ...], environment: Mapping[str, str]
) -> ForkedProcess:
    """Start the worker of a rank with its end of a connection, the notice board and the store.

    Raises LaunchError, or OSError where there is no server and none can be started.
    """
    request = ForkRequest(
        rank,
        size,
        {os.fsencode(name): os.fsencode(text) for name, text in environment.items()},
        tuple(map(os.fsencode, sys.path)),
        os.getcwdb(),
    )
    with _lock:
        return _server(environment).fork(request, descriptors)


def _server(environment: Mapping[str, str]) -> _ForkServerClient:
    """The server for an environment, whatever number of threads that asks for."""
    environment = {**environment, **_IN_SERVER}
    read = {name: text for name, text in environment.items() if name.startswith(_READ_AT_LOAD)}
    read.pop("PYTHONPATH", None)
    key = frozenset(read.items())
    if key in _servers and not _servers[key].is_there:
        _servers.pop(key).end()
    if key not in _servers:
        _servers[key] = _ForkServerClient(environment)
    return _servers[key]


@atexit.register
def _end_servers() -> None:
    for server in _servers.values():
        server.end()


def _forget_servers() -> None:
    """In a forked copy of this process, which has servers of its own."""
    global _lock
    _lock = threading.Lock()
    for server in _servers.values():
        server.forget()
    _servers.clear()


os.register_at_fork(after_in_child=_forget_servers)
